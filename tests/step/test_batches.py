import keras
import numpy as np
import pytest
import tensorflow as tf

from kmem.fit import pipeline
from kmem.step import batches

ROWS = np.zeros((50, 3), "float32")
X, Y, W = tf.TensorSpec((32, 3)), tf.TensorSpec((32, 1)), tf.TensorSpec((32,))


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return ROWS[:7], ROWS[:7, :1]


@pytest.mark.parametrize(
    "arguments, want",
    [
        ({"x": ROWS}, X),
        ({"x": ROWS, "y": ROWS[:, :1]}, (X, Y)),
        ({"x": ROWS.astype("float64"), "y": ROWS[:, :1]}, (X, Y)),
        (
            {"x": ROWS, "y": ROWS[:, :1], "sample_weight": ROWS[:, 0]},
            (X, Y, W),
        ),
        (
            {"x": ROWS, "y": ROWS[:, :1], "class_weight": {0: 1.0}},
            (X, Y, W),
        ),
        ({"x": tf.constant(ROWS), "batch_size": 8}, tf.TensorSpec((8, 3))),
        ({"x": ROWS, "batch_size": 64}, tf.TensorSpec((50, 3))),
        (
            {"x": ROWS, "batch_size": 64, "validation_split": 0.2},
            tf.TensorSpec((40, 3)),
        ),
        (
            {"x": {"a": ROWS, "b": ROWS}, "y": [ROWS[:, :1], ROWS]},
            ({"a": X, "b": X}, (Y, X)),
        ),
        ({"x": [ROWS, ROWS[:, :1]]}, ((X, Y),)),
        (
            {"x": tf.data.Dataset.from_tensors((ROWS[:5], ROWS[:5, :1]))},
            (tf.TensorSpec((5, 3)), tf.TensorSpec((5, 1))),
        ),
        ({"x": Rows()}, (tf.TensorSpec((7, 3)), tf.TensorSpec((7, 1)))),
    ],
    ids=[
        "x",
        "x and y",
        "float64 becomes float32",
        "sample weights",
        "class weights",
        "tensor",
        "fewer rows than a batch",
        "validation split",
        "dict and list",
        "list alone",
        "Dataset",
        "PyDataset",
    ],
)
def test_the_first_batch_of_fit_is_known_beforehand(arguments, want):
    assert pipeline.fit_batch(dict(arguments)) == want


def test_a_generator_keeps_its_first_batch():
    made = [(ROWS[:4], ROWS[:4, :1]), (ROWS[:2], ROWS[:2, :1])]
    arguments = {"x": iter(made)}

    found = pipeline.fit_batch(arguments)

    assert found == (tf.TensorSpec((4, 3)), tf.TensorSpec((4, 1)))
    assert [len(x) for x, _ in arguments["x"]] == [4, 2]


def test_a_batch_of_unknown_rows_is_none():
    assert pipeline.fit_batch({"x": None}) is None


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, Y),
        (X, None, W),
        ({"a": X, "b": [X, Y]}, tf.TensorSpec((), "int32")),
    ],
    ids=["x", "tuple", "no targets", "nested"],
)
def test_a_batch_survives_json(batch):
    assert batches.from_json(batches.to_json(batch)) == batch


@pytest.mark.parametrize("count, rows", [(1, 10), (2, 5), (3, 4), (20, 1)])
def test_the_largest_part_of_a_batch_is_rounded_up(count, rows):
    batch = tf.TensorSpec((10, 3)), tf.TensorSpec((10,)), tf.TensorSpec(())

    found = batches.part_of(batch, count)

    assert [spec.shape.as_list() for spec in found] == [[rows, 3], [rows], []]


def test_random_data_has_the_shapes_of_a_batch():
    batch = (tf.TensorSpec((2, 3)), None, tf.TensorSpec((2,), "int64"))

    x, none, classes = batches.random_data(batch)

    assert none is None
    assert (x.shape, x.dtype) == ((2, 3), "float32")
    assert classes.numpy().tolist() == [0, 0]


def test_a_batch_is_described_for_people():
    assert batches.describe((X, None, Y)) == "float32[32, 3], float32[32, 1]"


@pytest.mark.parametrize("text", ["7", "{}", "[", '{"tuple": 7}', "[[32, 8]]"])
def test_what_is_no_batch_in_json_is_refused(text):
    with pytest.raises(ValueError, match="must be what `kmem.plan` wrote"):
        batches.from_json(text)


def test_only_what_a_batchs_examples_have_gets_other_rows():
    nodes, labels = tf.TensorSpec((80, 6)), tf.TensorSpec((8, 1))

    resized = batches.with_rows((nodes, labels, nodes), 40)

    assert [spec.shape[0] for spec in resized] == [40, 8, 40]
    assert batches.part_of((nodes, labels), 1) == (nodes, labels)
    assert not batches.can_be_split((nodes, labels))
    assert batches.can_be_split((nodes, None, tf.TensorSpec(())))


def test_a_graph_calls_a_batch_what_it_is_called_in_keras():
    """The graph optimizer puts the factors of a product in the order of their
    names, and rounds so."""
    x, y = tf.TensorSpec((4, 3)), tf.RaggedTensorSpec((4, None))
    names = []

    @tf.function
    def names_of(*tensors):
        def take(data):
            flat = tf.nest.flatten(data, expand_composites=True)
            names.extend(tensor.op.name for tensor in flat)

        batches.of_leaves(take, (x, y))(*tensors)

    names_of.get_concrete_function(x, y)

    assert all(name.startswith("IteratorGetNext") for name in names)
    assert len(names) == 3
