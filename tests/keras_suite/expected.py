"""Keras's tests that do not pass under options, each with the reason.

A test that an entry names must fail, with the words that the entry says: one
that passes is an error, so that the list stays short.
"""

import dataclasses
import fnmatch


@dataclasses.dataclass(frozen=True)
class Listed:
    """Tests that do not pass.

    Attributes:
        tests: A pattern of names, such as `trainers/*::test_fit_*`.
        says: Words of the error.
        why: Why that is right.
        sets: The sets of options, as in `options.SETS`.
    """

    tests: str
    says: str
    why: str
    sets: tuple[str, ...]

    def names(self, option_set: str, test: str) -> bool:
        return option_set in self.sets and fnmatch.fnmatch(test, self.tests)


_MICROBATCHES = ("microbatches", "microbatches_and_remat")
_ACCUMULATION = ("accumulation",)

LISTED: list[Listed] = [
    Listed(
        "trainers/trainer_test.py::TestTrainer::test_fit_sparse_*",
        says="False is not true",
        why="the test wants a sparse gradient; those of parts are added up",
        sets=(*_MICROBATCHES, *_ACCUMULATION, "sharding"),
    ),
    *(
        Listed(
            f"trainers/trainer_test.py::TestTrainer::{test}",
            says="Not equal to tolerance",
            why="the test counts on an update for each batch",
            sets=_ACCUMULATION,
        )
        for test in ("test_fit_flow_*", "test_loss_weights")
    ),
    Listed(
        "trainers/*::test_steps_per_epoch_match_multi_epoch_*",
        says="Not equal to tolerance",
        why="a group of batches ends with its epoch, and the epochs differ",
        sets=_ACCUMULATION,
    ),
    *(
        Listed(
            test,
            says=says,
            why="the numbers are those of 16 bits",
            sets=("mixed_precision",),
        )
        for test, says in {
            "trainers/*::test_loss_weights": "Not equal to tolerance",
            "callbacks/*::test_swap_ema_weights": "!=",
            "callbacks/*::test_swap_ema_weights_with_loss_*": "!=",
            "optimizers/*::test_ema_with_model_fit": "Not equal to tolerance",
            "optimizers/*::test_fit_lr_correctness": "Not equal to tolerance",
        }.items()
    ),
    Listed(
        "trainers/*::test_retracing",
        says="not less than or equal to",
        why="every step runs its Python",
        sets=("dtr",),
    ),
    Listed(
        "callbacks/swap_ema_weights_test.py::*_with_invalid_optimizer",
        says="call `model.compile(jit_compile=False)`",
        why="the test wants another error, which comes later",
        sets=("dtr",),
    ),
    Listed(
        "models/*::test_required_none_raises_in_fit",
        says="`remat` must be a `kmem.Plan`",
        why="the test wants another error, which comes later",
        sets=("remat", "remat_roomy", "microbatches_and_remat"),
    ),
]

# What a refusal says. Every test whose `fit` raises one is listed by it.
REFUSALS: dict[str, tuple[str, ...]] = {
    "`microbatches` must not be larger than the batch size": _MICROBATCHES,
    "call `model.compile(jit_compile=False)`": ("dtr", "sharding"),
    "`dtr` must have one replica in a process": ("dtr",),
    "Gradients must be accumulated by kmem or by the optimizer": (
        "accumulation",
        "accumulation_of_one",
    ),
    "`sharding` needs a model that is built": ("sharding",),
    "`sharding` needs an optimizer": ("sharding",),
    "`sharding` needs constraints": ("sharding",),
    "exclude each other": ("sharding",),
    "`remat` must be a `kmem.Plan`": ("remat", "microbatches_and_remat"),
    "`mixed_precision` needs layers of float32": ("mixed_precision",),
    "must get ids as integers": ("mixed_precision",),
    "plans for batches of a fixed shape": (
        *("remat", "remat_roomy", "memory_budget", "microbatches_and_remat"),
    ),
}
