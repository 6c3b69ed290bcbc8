import dataclasses

import planning_cases as cases

from kmem.planning.graph import simulate
from kmem.planning.network import Network
from kmem.planning.network import Segment
from kmem.planning.network import Stage


def _layers() -> Network:
    """Normalisation, activation, convolution, of 100, 10 and 1 bytes."""
    return Network(
        stages=(
            Stage("norm", (0,), (1,), (0,), (0,), residual_bytes=5),
            Stage("relu", (1,), (2,), (2,), (1,)),
            Stage("conv", (2,), (3,), (2,), (2,), gradient_bytes=7),
        ),
        value_bytes=(1000, 100, 10, 1),
        inputs=frozenset({0}),
        resident_bytes=50,
    )


def test_graph_has_a_backward_operation_for_each_stage_in_reverse():
    graph = _layers().graph
    assert [operation.name for operation in graph.operations] == [
        "norm",
        "relu",
        "conv",
        "conv, backward",
        "relu, backward",
        "norm, backward",
    ]
    assert graph.num_forward == 3
    assert graph.constants == {0}
    assert graph.constant_bytes == 1050


def test_backward_reads_what_is_kept_and_the_gradient_of_the_output():
    graph = _layers().graph
    residual, conv_to_relu, of_kernel, relu_to_norm = 4, 5, 6, 7
    conv, relu, norm = graph.operations[3:]
    assert graph.operations[0].outputs == (1, residual)
    assert (conv.inputs, conv.outputs) == ((2,), (conv_to_relu, of_kernel))
    assert (relu.inputs, relu.outputs) == ((2, conv_to_relu), (relu_to_norm,))
    assert norm.inputs == (0, residual, relu_to_norm)
    assert graph.results == {of_kernel}


def test_memory_of_a_step_to_the_byte():
    network = _layers()
    result = simulate(network.graph, network.schedule(()))
    constant, residual, of_kernel = 1050, 5, 7
    assert [size - constant for size in result.step_bytes] == [
        100 + residual,
        100 + residual + 10,
        residual + 10 + 1,
        residual + 10 + 10 + of_kernel,
        residual + 10 + 10 + of_kernel + 100,
        residual + of_kernel + 100 + 1000,
    ]


def test_stages_without_gradients_have_no_backward():
    network = _layers()
    stages = list(network.stages)
    stages[0] = dataclasses.replace(stages[0], gradients=())
    network = dataclasses.replace(network, stages=tuple(stages))
    assert len(network.graph.operations) == 5


def test_gradients_of_several_readers_are_added_by_the_maker():
    network = Network(
        stages=(
            Stage("first", (0,), (1,), (0,), (0,)),
            Stage("left", (1,), (2,), (), (1,)),
            Stage("right", (1,), (3,), (), (1,)),
            Stage("add", (2, 3), (4,), (), (2, 3)),
        ),
        value_bytes=(1, 10, 20, 30, 40),
        inputs=frozenset({0}),
    )
    first = network.graph.operations[-1]
    assert first.name == "first, backward"
    # Two gradients of the first value, and their sum.
    sizes = [network.graph.tensor_bytes[t] for t in first.inputs]
    assert sizes == [1, 10, 10]
    assert first.workspace_bytes == 10


def test_passed_gradients_are_the_same_memory():
    network = Network(
        stages=(
            Stage("left", (0,), (1,), (0,), (0,)),
            Stage("right", (0,), (2,), (0,), (0,)),
            Stage("add", (1, 2), (3,), (), (1, 2), passed=(1, 2)),
            Stage("last", (3,), (4,), (3,), (3,)),
        ),
        value_bytes=(1, 10, 10, 10, 10),
        inputs=frozenset({0}),
    )
    last, add, right, left = network.graph.operations[4:]
    assert add.outputs == ()
    assert last.outputs[0] in left.inputs
    assert last.outputs[0] in right.inputs


def test_recomputation_leaves_out_what_nobody_reads():
    network = _layers()
    # The activation's output is kept by its own backward pass; nobody within
    # reads what the convolution makes.
    assert network.again(Segment(0, 3)) == ([0, 1], {0})
    assert network.again(Segment(2, 3)) == ([], {2})
    assert network.schedule((Segment(0, 3),)) == (0, 1, 2, 0, 1, 3, 4, 5)


def test_nested_segments_run_again_for_the_outer_and_for_themselves():
    network = cases.chain([1] * 6, [1] * 5, [1] * 5)
    plan = (Segment(0, 4, (Segment(0, 2), Segment(2, 3))),)
    backward = {stage: 9 - stage for stage in range(5)}
    assert network.schedule(plan) == (
        *(0, 1, 2, 3, 4, backward[4]),
        *(0, 1, 2, 3, backward[3]),
        *(2, backward[2]),
        *(0, 1, backward[1], backward[0]),
    )


def test_an_inner_segment_at_the_end_is_run_once():
    # The outer one's recomputation does not need it: it is next to run.
    network = cases.chain([1] * 5, [1] * 4, [1] * 4)
    plan = (Segment(0, 4, (Segment(2, 4),)),)
    assert network.schedule(plan).count(2) == 2
    assert network.again(plan[0])[0] == [0, 1]


def test_segments_keep_to_lines_and_to_stages_that_may_run_twice():
    network = cases.chain([1] * 6, [1] * 5, [1] * 5)
    assert network.allows(1, 4)
    lined = dataclasses.replace(network, lines=((0, 3, 5), (1, 4)))
    assert lined.allows(0, 5)
    assert lined.allows(1, 4)
    assert not lined.allows(0, 4)
    once = dataclasses.replace(network.stages[2], recomputable=False)
    stages = (*network.stages[:2], once, *network.stages[3:])
    network = dataclasses.replace(network, stages=stages)
    assert network.allows(0, 2)
    assert not network.allows(1, 4)
