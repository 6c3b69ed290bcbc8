import tensorflow as tf

from kmem.ordering import hold_back


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


def test_the_chain_waits_for_the_weight_gradients_of_the_layer_before():
    (first, second, third), _ = chain_gradients(3)

    def waits_for(gradient):
        chain = next(
            t.op for t in gradient.op.inputs if t.op.type == "TanhGrad"
        )
        return chain.control_inputs

    # Backwards: the last layer's gradients come first.
    assert second.op in waits_for(first)
    assert third.op in waits_for(second)
    assert waits_for(third) == []


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
