import keras
import numpy as np
import pytest
from keras import layers

from kmem.base.private_keras import all_layers
from kmem.keras_graph import opening


class Log(opening.Visitor):
    """Notes what comes by, and runs it."""

    def __init__(self):
        self.lines = []
        self.trees = []
        self.children = []

    def run_line(self, model, line, values, bind):
        names = [part.operation.name for part in line.parts]
        self.lines.append((model.name, names))
        super().run_line(model, line, values, bind)

    def run_tree(self, model, call, /, *args, **kwargs):
        self.trees.append(model.name)
        return super().run_tree(model, call, *args, **kwargs)

    def run_child(self, layer, call, /, *args, **kwargs):
        self.children.append(layer.name)
        return super().run_child(layer, call, *args, **kwargs)


class Looping(keras.Model):
    def __init__(self):
        super().__init__(name="looping")
        self.shared = layers.Dense(6, name="shared")
        self.head = keras.Sequential(
            [layers.Dense(4, name="inner")], name="head"
        )

    def call(self, x):
        for _ in range(3):
            x = self.shared(x)
        return self.head(x)


class Holder(layers.Layer):
    """A layer, no model, with a model inside."""

    def __init__(self, model):
        super().__init__(name="holder")
        self.model = model

    def call(self, x):
        return self.model(x)


def functional():
    inputs = keras.Input((6,))
    shared = layers.Dense(6, name="shared")
    first = shared(inputs)
    second = shared(first)
    total = layers.Add(name="total")([first, second])
    return keras.Model(inputs, {"total": total, "first": first}, name="outer")


def sequential():
    block = [layers.Dense(6, name="first"), layers.ReLU(name="second")]
    return keras.Sequential([keras.Input((6,)), *block], name="outer")


def nested():
    inner = sequential()
    inputs = keras.Input((6,))
    outputs = layers.Dense(2, name="last")(inner(inner(inputs)))
    return keras.Model(inputs, outputs, name="whole")


def holding():
    inputs = keras.Input((6,))
    return keras.Model(inputs, Holder(sequential())(inputs), name="whole")


def opened(model):
    """What a visitor sees, after the outputs were compared."""
    x = np.random.default_rng(0).normal(size=(3, 6)).astype("float32")
    want = model(x)
    log = Log()
    with opening.opened(model, log):
        got = model(x)
    keras.tree.map_structure(np.testing.assert_array_equal, got, want)
    return log


@pytest.mark.parametrize(
    "make, lines",
    [
        (functional, [("outer", ["shared", "shared", "total"])]),
        (sequential, [("outer", ["first", "second"])]),
        (
            nested,
            [
                ("whole", ["outer", "outer", "last"]),
                ("outer", ["first", "second"]),
                ("outer", ["first", "second"]),
            ],
        ),
        (
            holding,
            [("whole", ["holder"]), ("outer", ["first", "second"])],
        ),
    ],
    ids=["functional", "sequential", "nested", "model in a layer"],
)
def test_a_functional_model_runs_as_a_line(make, lines):
    log = opened(make())

    assert log.lines == lines
    assert log.trees == log.children == []


def test_a_subclassed_model_shows_each_call_of_its_layers():
    model = Looping()

    log = opened(model)

    assert log.trees == ["looping"]
    assert log.children == ["shared"] * 3 + ["head"]

    # Keras calls a quantized layer by another method.
    model.shared.quantize("int8")
    assert opened(model).children == log.children
    assert log.lines == [("head", ["inner"])]


@pytest.mark.parametrize("make", [functional, nested, Looping])
def test_a_model_is_closed_again_after_an_error(make):
    model = make()
    model(np.zeros((1, 6), "float32"))
    names = [set(vars(layer)) for layer in all_layers(model)]

    with pytest.raises(KeyboardInterrupt):
        with opening.opened(model, Log()):
            raise KeyboardInterrupt

    assert [set(vars(layer)) for layer in all_layers(model)] == names


def test_an_opened_model_still_takes_symbolic_tensors():
    model = functional()
    log = Log()

    with opening.opened(model, log):
        outputs = model(keras.Input((6,)))

    assert outputs["total"].shape == (None, 6)
    assert log.lines == []


def test_a_line_knows_where_its_values_are_read_last():
    found = []

    class Lines(opening.Visitor):
        def run_line(self, model, line, values, bind):
            found.append(line)
            super().run_line(model, line, values, bind)

    model = functional()
    with opening.opened(model, Lines()):
        model(np.zeros((1, 6), "float32"))

    (line,) = found
    first, second, total = (part.makes[0] for part in line.parts)
    assert line.parts[2].reads == (first, second)
    # The first one is an output of the model.
    assert line.last_reads[second] == 2
    assert line.last_reads[first] == line.last_reads[total] == 3


def test_keras_keeps_what_opening_needs():
    """Private in Keras, and used in kmem/keras_graph/opening.py alone."""
    model = functional()
    inside = sequential()._functional

    for each in (model, inside):
        assert callable(each._run_through_graph)
        assert each._outputs_struct is not None
    nodes = [n for nodes in model._nodes_by_depth.values() for n in nodes]
    (total,) = (n for n in nodes if n.operation.name == "total")
    assert not total.is_input
    args, kwargs = total.arguments.fill_in(
        {id(x): number for number, x in enumerate(total.input_tensors)}
    )
    assert (args, kwargs) == (([0, 1],), {})
    assert sum(n.is_input for n in nodes) == 1
    # What runs a graph's operations is called by its layer's `call`.
    log = Log()
    with opening.opened(model, log):
        model.call(np.zeros((1, 6), "float32"))
    assert len(log.lines) == 1
