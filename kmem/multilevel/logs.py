"""What a program's logs hold, and what they are warned of.

Losses of levels, and what solvers left of the gradients that they were given.
"""

import warnings

import keras
import numpy as np

from kmem.multilevel.solvers import Solver

# Where as much as this of a gradient is left, nothing was solved.
_MOST_LEFT = 0.99


def loss_trackers(levels: list) -> list[list[keras.metrics.Mean]]:
    """For each level the means of its losses, and of what they give besides."""
    return [
        [keras.metrics.Mean(name=f"{level.name}_{key}") for key in level.logged]
        for level in levels
    ]


def residual_trackers(levels: list) -> list[keras.metrics.Mean | None]:
    """For each level that has a solver the mean of what that leaves."""
    return [
        keras.metrics.Mean(name=f"{level.name}_residual")
        if isinstance(level.hypergradient, Solver)
        and level.hypergradient.iterations
        else None
        for level in levels
    ]


def results(losses: list, residuals: list) -> dict:
    """The logs so far."""
    logs = {each.name: each.result() for level in losses for each in level}
    *below, top = [logs[level[0].name] for level in losses]
    # Zero times what is not finite is not a number.
    loss = {"loss": top + sum(0.0 * each for each in below)}
    left = {each.name: each.result() for each in residuals if each is not None}
    return loss | logs | left


def warn(levels: list, history: dict[str, list]) -> None:
    """Warns of what went wrong in a training, by the level's name; `history`
    has for each name in the logs the means of the epochs."""
    for level in levels:
        # Of what is not a number nothing is true.
        left = history.get(f"{level.name}_residual", [0.0])
        if not left[-1] < _MOST_LEFT:
            warnings.warn(
                f"The solver of level '{level.name}' did not converge: its "
                f"residual is {left[-1]:.3g} of the gradient's norm, in the "
                "mean of the last epoch, so the gradient through the level is "
                "wrong. Try more `iterations`; `damping`, or "
                "`MinimalResidual`, where the Hessian has negative "
                f"eigenvalues; a smaller `alpha`. It is {level.hypergradient}",
                stacklevel=3,
            )
    names = [each.name for each in levels if f"{each.name}_loss" in history]
    lost = ~np.isfinite([history[f"{name}_loss"] for name in names])
    epochs = np.flatnonzero(lost.any(axis=0))
    if epochs.size:
        first = epochs[0]
        names = [f"'{names[i]}'" for i in np.flatnonzero(lost[:, first])]
        warnings.warn(
            f"The loss of level {', '.join(names)} is not finite from epoch "
            f"{first + 1} of this `fit` on. Its variables may have diverged: "
            "keep them within bounds, such as by `ops.sigmoid` or "
            "`ops.softplus` in the loss or by a `constraint`, or give the "
            "level `clipnorm` or a smaller learning rate.",
            stacklevel=3,
        )
