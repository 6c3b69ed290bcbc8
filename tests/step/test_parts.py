import numpy as np
import pytest
import tensorflow as tf

from kmem.step.parts import Parts


def rows_of_parts(data, count):
    """The rows of every part, in order, as the parts come."""
    seen = []

    def note(part, rows):
        seen.append(part)
        first = next(x for x in tf.nest.flatten(part) if x is not None)
        assert int(rows) == len(first)
        return [tf.cast(rows, tf.float64)]

    (total,) = Parts(data, count).sum(note)
    return seen, int(total)


@pytest.mark.parametrize(
    ("rows", "count", "sizes"),
    [
        (12, 3, [4, 4, 4]),
        (13, 3, [3, 5, 5]),
        (10, 4, [1, 3, 3, 3]),
        (9, 8, [1, 2, 2, 2, 2]),
        (2, 4, [1, 1]),
        (1, 4, [1]),
        (5, 1, [5]),
    ],
)
def test_the_first_part_takes_the_remainder(rows, count, sizes):
    data = tf.range(rows)

    parts, total = rows_of_parts(data, count)

    assert [len(part) for part in parts] == sizes
    assert total == rows
    np.testing.assert_array_equal(tf.concat(parts, 0), data)


def test_structures_keep_their_form_and_what_has_no_rows():
    data = ({"x": tf.range(4), "none": None}, tf.constant(7), None)

    parts, _ = rows_of_parts(data, 2)

    for part, rows in zip(parts, ([0, 1], [2, 3]), strict=True):
        assert part[0]["none"] is None and part[2] is None
        assert part[1] == 7
        assert part[0]["x"].numpy().tolist() == rows


@pytest.mark.parametrize("in_graph", [False, True])
def test_ragged_and_sparse_tensors_are_split_by_rows(in_graph):
    ragged = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6]])
    sparse = tf.sparse.from_dense([[1, 0], [0, 2], [3, 0], [4, 5]])

    def sums():
        def function(part, rows):
            dense = tf.sparse.to_dense(part[1])
            return [
                tf.reduce_sum(part[0]) * rows,
                tf.reduce_sum(dense) * rows,
            ]

        return Parts((ragged, sparse), 3).sum(function)

    # Parts of 2 and 2 rows.
    values = tf.function(sums)() if in_graph else sums()

    assert [int(value) for value in values] == [42, 30]


def test_tensors_of_different_rows_are_refused():
    with pytest.raises(ValueError, match=r"rows=\[2, 3\]"):
        Parts((tf.range(2), tf.range(3)), 2)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_loop_adds_up_what_a_call_would(traced, jit_compile):
    @tf.function(jit_compile=jit_compile)
    def total(x):
        parts = Parts(x, 3)
        add_up = parts.sum_traced if traced else parts.sum
        return add_up(lambda part, rows: [tf.reduce_sum(part**2)])

    x = tf.range(10.0)

    assert float(total(x)[0]) == float(tf.reduce_sum(x**2))


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_seen_to_differ_in_rows_when_it_runs_is_refused(compiled):
    unknown = tf.TensorSpec((None,))

    @tf.function(input_signature=[unknown, unknown], jit_compile=compiled)
    def rows(x, y):
        return Parts((x, y), 2).rows

    assert rows(tf.ones(8), tf.ones(8)) == 8
    message = "the requested shape has|the same number of rows"
    for x, y in ((8, 9), (9, 8)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            rows(tf.ones(x), tf.ones(y))
