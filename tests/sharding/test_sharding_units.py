"""When units gather their weights, and what runs again for it."""

import keras
import pytest
import tensorflow as tf
from graphs import ancestors

from kmem.sharding import units
from kmem.sharding import variables
from kmem.sharding.engine import Engine

DEPTH = 4


class _Noting(Engine):
    """Notes the operations that gather, and what they wait for."""

    def __init__(self):
        super().__init__()
        self.gathered, self.waited = [], []

    def gather(self, tensor, name):
        self.waited.append([op.name for op in tf.no_op().control_inputs])
        gathered = super().gather(tensor, name)
        self.gathered.append(gathered.op)
        return gathered


def cut(weights):
    """Cuts weights; the engine that gathers them."""
    engine = _Noting()
    for number, variable in enumerate(weights):
        variables.shard(variable, engine, f"weight {number}")
    return engine


def attention(x):
    return keras.layers.MultiHeadAttention(2, 2, dropout=0.5)(x, x)


def chain(dtype="float32", num_frozen=0):
    model = keras.Sequential([keras.Input((3,))])
    for number in range(DEPTH):
        model.add(keras.layers.Dense(3, "tanh", use_bias=False, dtype=dtype))
        model.layers[-1].trainable = number >= num_frozen
    return model


def trained(model, keeps=False):
    """The gradients of the shards, in a graph."""

    @tf.function(autograph=False)
    def run(x):
        with (
            tf.GradientTape() as tape,
            units.applied(units.find(model, None), keeps),
        ):
            y = model(x, training=True)
        shards = [v.shard.variable for v in model.trainable_variables]
        return tape.gradient(y, shards)

    inputs = tf.TensorSpec((2, *model.input_shape[1:]))
    graph = run.get_concrete_function(inputs).graph
    return [gradient.op for gradient in graph.outputs]


def test_a_forward_pass_gathers_weights_while_the_unit_before_runs():
    model = chain()
    engine = cut(model.weights)
    outputs = []

    @tf.function(autograph=False)
    def run(x):
        outputs.append(x.op.name)
        with units.applied(units.find(model, None), keeps=True):
            for layer in model.layers:
                x = layer(x)
                outputs.append(x.op.name)

    run.get_concrete_function(tf.TensorSpec((2, 3)))
    before = [outputs[0], *outputs]
    assert engine.waited == [[name] for name in before[:DEPTH]]


@pytest.mark.parametrize(
    "call, costly",
    [
        (lambda x: keras.layers.Dense(2, "gelu")(x), "Erfc"),
        (lambda x: keras.layers.Dense(2)(x), "MatMul"),
        (lambda x: keras.layers.Conv2D(2, 3, activation="relu")(x), "Conv2D"),
        (lambda x: keras.layers.BatchNormalization()(x), "Rsqrt"),
        (attention, "Einsum"),
        (attention, "StatelessRandomUniformV2"),
    ],
)
def test_no_layer_runs_again(call, costly):
    inputs = keras.Input((8, 8, 2))
    model = keras.Model(inputs, call(call(inputs)))
    cut(model.trainable_weights)

    def num_costly(keeps):
        ops = ancestors(*trained(model, keeps), by_data=True)
        # In Keras 3.12 a product of this rank is a `BatchMatMulV2`.
        return sum(costly in op.type for op in ops)

    assert num_costly(keeps=False) == num_costly(keeps=True) > 0


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_backward_pass_reads_the_weights_that_it_has_gathered(dtype):
    model = chain(dtype)
    engine = cut(model.weights)

    gradients = trained(model)

    forward, again = engine.gathered[:DEPTH], engine.gathered[DEPTH:]
    assert [num_products(op) for op in forward] == DEPTH * [1]
    # The gradient of the first unit's input is not wanted.
    *needed, _ = again
    assert set(needed) <= ancestors(*gradients, by_data=True)


def num_products(op):
    """How many products read what is made of an operation's results alone."""
    if op.type == "MatMul":
        return 1
    readers = {reader for out in op.outputs for reader in out.consumers()}
    return sum(map(num_products, readers))


def test_weights_that_no_gradient_needs_are_not_gathered_again():
    model = chain(num_frozen=2)
    engine = cut(model.weights)

    trained(model)

    assert len(engine.gathered) == DEPTH + 2


@pytest.mark.parametrize("quantized", [False, True])
def test_a_quantized_layer_gathers_its_adapters_when_it_is_called(quantized):
    model = chain()
    for layer in model.layers:
        if quantized:
            layer.quantize("int8")
        layer.enable_lora(2)
    engine = cut(model.trainable_weights)

    trained(model, keeps=True)

    # Both of a layer together.
    assert len(engine.gathered) == DEPTH


def test_the_penalty_of_a_weight_is_a_regularizer_of_keras_meanwhile():
    """Keras 3.12 takes no other function for one."""
    model = chain()
    plain = model.layers[0].kernel.regularizer = keras.regularizers.L2(0.1)
    cut(model.weights)

    with units.applied(units.find(model, None), keeps=False):
        penalty = model.layers[0].kernel.regularizer
        assert penalty is not plain
        assert isinstance(penalty, keras.regularizers.Regularizer)
    assert model.layers[0].kernel.regularizer is plain


def test_shards_elsewhere_are_fetched_while_the_unit_before_runs():
    model = keras.Sequential([keras.Input((3,))])
    for number in range(2):
        model.add(keras.layers.Dense(3))
        kernel = model.layers[-1].kernel
        variables.shard(kernel, Engine(), f"weight {number}", home="CPU:0")

    @tf.function(autograph=False)
    def run(x):
        with units.applied(units.find(model, None), keeps=True):
            return model(x)

    graph = run.get_concrete_function(tf.TensorSpec((2, 3))).graph
    held = [
        [waited.name for waited in op.control_inputs]
        for op in graph.get_operations()
        if op.type == "ReadVariableOp" and op.control_inputs
    ]
    assert held == 2 * [[graph.inputs[0].op.name]]
