"""Gradients that have none themselves."""

import tensorflow as tf


def once_differentiable(gradients: list, sources: list, name: str) -> list:
    """The gradients, of which a gradient is an error.

    Else what a function of its own gradient has forgotten would count as
    constant.

    Args:
        sources: What the gradients depend on.
        name: What has been differentiated.
    """

    @tf.custom_gradient
    def compute(*tensors):
        def refuse(*_):
            raise ValueError(
                f"The gradient of a {name} in chunks must not be "
                "differentiated: what it was computed from is gone. Leave "
                "chunks out where second derivatives are taken. Received: a "
                "second gradient"
            )

        given = tensors[: len(gradients)]
        return tuple(tf.identity(each) for each in given), refuse

    return list(compute(*gradients, *sources))
