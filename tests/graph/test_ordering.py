import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from graphs import ancestors

from kmem import remat
from kmem.graph.ordering import hold_back
from kmem.step import updates


def chain_gradients(length):
    """Traces the gradients of a chain of matrix products."""
    kernels = [tf.Variable(tf.eye(3)) for _ in range(length)]
    traced = []

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            for kernel in kernels:
                x = tf.tanh(x @ kernel)
            loss = tf.reduce_sum(x)
        gradients = tape.gradient(loss, kernels)
        hold_back(gradients)
        traced.extend(gradients)
        return gradients

    values = step(tf.ones((2, 3)))
    return traced, values


def in_graph(function, *arguments):
    """What a function returns when it is traced."""
    returned = []
    trace = tf.function(
        lambda *tensors: returned.append(function(*tensors)), autograph=False
    )
    trace.get_concrete_function(*map(tf.TensorSpec, arguments))
    return returned[0]


def test_the_chain_goes_on_beside_one_weight_gradient_at_the_most():
    (first, second, third), _ = chain_gradients(3)

    def of_input(gradient):
        """The gradient beside it, which the chain goes on from."""
        (other,) = (
            op
            for op in gradient.graph.get_operations()
            if op is not gradient.op
            and op.type == "MatMul"
            and op.inputs[0] is gradient.op.inputs[1]
        )
        return other

    # Backwards: the last layer's gradients come first.
    assert third.op in ancestors(of_input(second))
    assert second.op not in ancestors(of_input(second))
    assert third.op in ancestors(second.op)
    assert second.op in ancestors(first.op)


def test_what_came_with_a_gradient_is_there_before_the_chain_goes_on():
    """It frees what it is made from: both halves of a skip's gradient do."""

    def trace(x, *kernels):
        with tf.GradientTape() as tape:
            tape.watch(kernels)
            first, *rest = kernels
            x = skip = tf.tanh(x @ first)
            for kernel in rest:
                x = tf.tanh(x @ kernel)
            loss = tf.reduce_sum(tf.concat([skip, x], -1) ** 2)
        gradients = tape.gradient(loss, kernels)
        hold_back(gradients)
        return gradients

    gradients = in_graph(trace, (8, 3), *[(3, 3)] * 4)

    first, second, third, _ = gradients
    halves = [op for op in second.graph.get_operations() if op.type == "Slice"]
    assert len(halves) == 2
    assert ancestors(third.op) < ancestors(second.op)
    assert set(halves) <= ancestors(first.op)


@pytest.mark.parametrize("rows", [4096, None])
def test_branches_do_not_hold_large_arrays_side_by_side(rows):
    """Layer by layer, as a functional model runs its branches."""

    def trace(x, *kernels):
        with tf.GradientTape() as tape:
            tape.watch(kernels)
            branches = [x @ kernel for kernel in kernels]
            for function in (tf.cos, tf.sin, tf.tan):
                branches = [function(branch) for branch in branches]
            loss = tf.reduce_sum(tf.exp(tf.add_n(branches)))
        gradients = tape.gradient(loss, kernels)
        hold_back(gradients)
        return gradients

    gradients = in_graph(trace, (rows, 64), *[(64, 64)] * 4)

    # The branch whose gradient comes first does not wait for anything.
    before = [ancestors(gradient.op) for gradient in gradients]
    needed = set().union(*before) - min(before, key=len)
    products = [op for op in needed if op.type == "Mul"]
    assert len(products) > 6
    for one, other in itertools.combinations(products, 2):
        assert one in ancestors(other) or other in ancestors(one)


def test_a_recomputation_starts_when_all_before_it_is_done():
    def trace(x, *kernels):
        part = remat.recompute(lambda x, kernel: tf.tanh(x @ kernel))
        with tf.GradientTape() as tape:
            tape.watch(kernels)
            for kernel in kernels:
                x = part(x, kernel)
            loss = tf.reduce_sum(x)
        gradients = tape.gradient(loss, kernels)
        hold_back(gradients)
        return gradients

    first, second = in_graph(trace, (8, 3), (3, 3), (3, 3))

    forward, *_, again = (
        op for op in first.graph.get_operations() if op.type == "Tanh"
    )
    assert second.op in ancestors(again)
    # TensorFlow may fuse what does not wait by itself.
    assert again.control_inputs == forward.control_inputs == []


def test_the_gradient_of_a_loop_is_ordered_without_a_cycle():
    """It makes the loop anew, after what reads the loop's results."""
    kernels = [tf.Variable(tf.eye(3)) for _ in range(2)]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            x = tf.tanh(x @ kernels[0])
            _, x = tf.while_loop(
                lambda i, x: i < 3, lambda i, x: (i + 1, tf.sin(x)), (0, x)
            )
            loss = tf.reduce_sum(tf.tanh(x @ kernels[1]))
        gradients = tape.gradient(loss, kernels)
        hold_back(gradients)
        return gradients

    assert all(tf.reduce_any(g != 0) for g in step(tf.ones((2, 3))))


def test_nothing_is_run_for_the_order_alone():
    def trace(ordered, kernel, other):
        with tf.GradientTape() as tape:
            tape.watch([kernel, other])
            # The gradient of the random addend is traced, and not wanted.
            x = tf.tanh(tf.tanh(kernel) + tf.exp(tf.random.normal((3, 3))))
            loss = tf.reduce_sum(x @ other)
        gradients = tape.gradient(loss, [kernel, other])
        if ordered:
            hold_back(gradients)
        ops = {gradient.op for gradient in gradients}
        return len(ops | ancestors(*ops))

    shapes = (3, 3), (3, 3)
    counts = [
        in_graph(functools.partial(trace, ordered), *shapes)
        for ordered in (False, True)
    ]

    assert counts[0] == counts[1]


def test_an_optimizer_updates_one_variable_after_another():
    kernels = [keras.Variable(np.eye(3, dtype="float32")) for _ in range(3)]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(kernels)

    def trace(*gradients):
        gradients = [tf.exp(gradient) for gradient in gradients]
        with updates.in_turn(optimizer, gradients):
            optimizer.apply(gradients, kernels)
        return [gradient.op for gradient in gradients]

    gradients = in_graph(trace, *[(3, 3)] * 3)

    assigned = [
        op
        for op in gradients[0].graph.get_operations()
        if op.type.startswith("Assign") and gradients[0] in ancestors(op)
    ]
    assert len(assigned) == 6
    for before, after in itertools.pairwise(assigned[1::2]):
        assert before in ancestors(after)
    momenta = [op for op in ancestors(*assigned) if op.type == "Mul"]
    assert momenta
    assert all(set(gradients) <= ancestors(op) for op in momenta)
    assert "update_step" not in vars(optimizer)


def test_the_order_changes_no_value():
    _, values = chain_gradients(4)
    kernels = [tf.Variable(tf.eye(3)) for _ in range(4)]
    with tf.GradientTape() as tape:
        x = tf.ones((2, 3))
        for kernel in kernels:
            x = tf.tanh(x @ kernel)
        loss = tf.reduce_sum(x)
    want = tape.gradient(loss, kernels)

    for got, gradient in zip(values, want, strict=True):
        tf.debugging.assert_near(got, gradient)


def test_missing_and_sparse_gradients_are_taken_as_they_are():
    table = tf.Variable(tf.eye(4))
    unused = tf.Variable(1.0)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, ids) ** 2)
        gradients = tape.gradient(loss, [table, unused])
        hold_back(gradients)
        hold_back([None])
        return tf.convert_to_tensor(gradients[0])

    assert step(tf.constant([1, 1])).shape == (4, 4)


@pytest.mark.parametrize("regularizer", [None, "l2"])
def test_nothing_comes_between_the_gradients_of_a_convolution(regularizer):
    convolution = keras.layers.Conv2D(4, 3, bias_regularizer=regularizer)
    padding = keras.layers.ZeroPadding2D(1)
    x = tf.random.stateless_normal((2, 8, 8, 3), seed=(1, 2))
    convolution.build(padding(x).shape)
    head = tf.Variable(tf.eye(4))
    weights = [w.value for w in convolution.trainable_weights] + [head]

    def gradients(block):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(block(x)) @ head)
            loss += sum(convolution.losses)
        return tape.gradient(loss, weights)

    @tf.function(autograph=False)
    def held_back():
        # Its padding is done again for the kernel's gradient alone.
        made = gradients(remat.recompute(lambda x: convolution(padding(x))))
        hold_back(made)
        return made

    @tf.function(autograph=False)
    def plain():
        return gradients(lambda x: convolution(padding(x)))

    for got, expected in zip(held_back(), plain(), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_nothing_waits_for_a_product_that_is_joined_with_the_next_one():
    """Such as those of gelu's gradient: they would be rounded one by one."""
    waits_before = set()

    def waits(graph):
        return {
            (op.name, source.type)
            for op in graph.get_operations()
            for source in op.control_inputs
        }

    def trace(x, *kernels):
        with tf.GradientTape() as tape:
            tape.watch(kernels)
            skip = x = tf.nn.gelu(x @ kernels[0])
            for kernel in kernels[1:]:
                x = tf.nn.gelu(x @ kernel)
            loss = tf.reduce_sum(tf.concat([skip, x], -1) ** 2)
        gradients = tape.gradient(loss, kernels)
        waits_before.update(waits(gradients[0].graph))
        hold_back(gradients)
        return gradients

    gradients = in_graph(trace, (8, 3), *[(3, 3)] * 4)

    made = waits(gradients[0].graph) - waits_before
    assert made
    assert "Mul" not in {source for _, source in made}


def test_a_product_of_several_shapes_is_multiplied_as_without_an_order():
    """TensorFlow multiplies the small factors first, unless one has to wait."""
    rate = tf.Variable(tf.random.stateless_normal((3,), (1, 2)))
    kernels = [
        tf.Variable(tf.random.stateless_normal(shape, (3, 4)))
        for shape in ((3, 3), (5, 5))
    ]
    x = tf.random.stateless_normal((7, 5, 3), (5, 6))

    def step(is_ordered):
        @tf.function(input_signature=[tf.TensorSpec((None, 5, 3))])
        def gradients(x):
            with tf.GradientTape() as tape:
                decay = -tf.exp(rate) * tf.nn.softplus(x @ kernels[0])
                decay = tf.transpose(decay, (0, 2, 1))
                loss = tf.reduce_sum(tf.tanh(decay @ kernels[1]))
            made = tape.gradient(loss, [*kernels, rate])
            if is_ordered:
                hold_back(made)
            return made

        return gradients(x)

    for got, expected in zip(step(True), step(False), strict=True):
        np.testing.assert_array_equal(got, expected)
