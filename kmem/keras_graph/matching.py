"""Tells whether a plan was made for a model, and if not, how they differ."""

import re

from kmem.base.sizes import format_size
from kmem.keras_graph.profiling import distinct
from kmem.keras_graph.profiling import signature
from kmem.keras_graph.recording import Recording
from kmem.keras_graph.recording import num_bytes
from kmem.planning.network import Network


def check(network: Network, recording: Recording) -> None:
    """Checks that a network is what was recorded.

    Names may differ in the numbers that Keras puts at their ends.

    Raises:
        ValueError: If it is not; the message names the first difference.
    """
    difference = _difference(network, recording)
    if difference:
        raise ValueError(
            "`remat` must be a plan for this model and this batch: make it "
            f"again with `kmem.plan`. Received: {difference}"
        )


def structure(recording: Recording) -> tuple:
    """What makes two recordings the same, as something to look up by."""
    return tuple(
        (
            _base(call.name),
            signature(call),
            call.reads,
            tuple((v, num_bytes(recording.tensors[v])) for v in call.makes),
        )
        for call in recording.calls
    )


def _difference(network: Network, recording: Recording) -> str:
    for index, (stage, call) in enumerate(
        zip(network.stages, recording.calls, strict=False)
    ):
        if _base(stage.name) != _base(call.name):
            return (
                f"a plan whose operation {index} is {stage.name!r}, for a "
                f"model whose operation {index} is {call.name!r}"
            )
        wired = stage.inputs, stage.outputs
        if wired != (distinct(call.reads), call.makes):
            return (
                f"a plan in which {stage.name!r} is connected otherwise than "
                "in the model"
            )
        sizes = [network.value_bytes[v] for v in call.makes]
        actual = [num_bytes(recording.tensors[v]) for v in call.makes]
        if sizes != actual:
            return (
                f"a plan in which {stage.name!r} gives "
                f"{format_size(sum(sizes))}, for a model in which it gives "
                f"{format_size(sum(actual))}"
            )
    if len(network.stages) != len(recording.calls):
        return (
            f"a plan of {len(network.stages)} operations, for a model of "
            f"{len(recording.calls)}"
        )
    return ""


def _base(name: str) -> str:
    return re.sub(r"(_\d+)+$", "", name)
