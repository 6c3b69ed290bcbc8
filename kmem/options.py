"""The options of `fit`, as frozen dataclasses that are valid once made.

This is the only place where the short forms ("5GB", 0.5, True, "full") are
parsed. It knows nothing of models: what an option does is elsewhere.
"""

import dataclasses
import difflib
import functools
import os
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Literal
from typing import TypedDict

# A dependency of TensorFlow's.
from typing_extensions import Unpack

from kmem.base.bindings import AUTO
from kmem.base.bindings import HEURISTICS
from kmem.base.checks import budget
from kmem.base.checks import classes
from kmem.base.checks import is_integer
from kmem.base.checks import is_real
from kmem.base.checks import must_be
from kmem.base.checks import names
from kmem.base.checks import one_of
from kmem.base.checks import positive_int
from kmem.base.checks import set_fields
from kmem.base.sizes import parse_size
from kmem.planning.flat import Genetic
from kmem.planning.plan import Plan


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """Split every batch into micro-batches, with one update of the batch.

    Args:
        count: The number of micro-batches, a positive integer. They have
            equal sizes, except one that may be smaller. A batch with fewer
            examples has micro-batches of one example.

    Raises:
        ValueError: If `count` is not a positive integer.
    """

    count: int

    def __post_init__(self):
        set_fields(self, count=positive_int(self.count, "microbatches"))


@dataclasses.dataclass(frozen=True)
class GradientAccumulation:
    """One update for every `steps` batches, equal to that of their union.

    Args:
        steps: The number of batches, a positive integer. The last group of an
            epoch may be smaller; it is applied with its true weight.

    Raises:
        ValueError: If `steps` is not a positive integer.
    """

    steps: int

    def __post_init__(self):
        name = "gradient_accumulation_steps"
        set_fields(self, steps=positive_int(self.steps, name))


@dataclasses.dataclass(frozen=True)
class MixedPrecision:
    """Compute in 16 bits, and keep variables in 32.

    This option changes the numbers: activations and gradients are rounded to
    `dtype`.

    Args:
        dtype: `"bfloat16"` or `"float16"`. With `"float16"` the loss is
            scaled, as `keras.optimizers.LossScaleOptimizer` does.
        initial_scale: The first loss scale, for `"float16"` only.
        dynamic_growth_steps: The number of updates without an infinite
            gradient after which the loss scale doubles, for `"float16"` only.
        exclude: Names of layers that stay in float32.

    Raises:
        ValueError: If a field is not of this form.
    """

    dtype: Literal["bfloat16", "float16"]
    initial_scale: float = 2.0**15
    dynamic_growth_steps: int = 2000
    exclude: tuple[str, ...] = ()

    def __post_init__(self):
        one_of(self.dtype, "mixed_precision", ("bfloat16", "float16"))
        scale, kind = self.initial_scale, "a number from 2**-126 to 2**127"
        fits = is_real(scale, 2.0**-126, 2.0**127)
        must_be(fits, scale, "initial_scale", kind)
        steps = positive_int(self.dynamic_growth_steps, "dynamic_growth_steps")
        exclude = names(self.exclude, "exclude")
        set_fields(self, dynamic_growth_steps=steps, exclude=exclude)


@dataclasses.dataclass(frozen=True)
class Remat:
    """Activation checkpointing by a plan: recompute what it does not keep.

    Args:
        budget: The device's peak during a training step, with everything in
            it: bytes, a size such as `"2GB"`, a share in (0, 1] of the peak
            without a plan, or `"auto"`, the smallest predicted peak whose
            predicted slowdown is at most 1.3x.
        solver: `"optimal"`, `"sqrt"` or `kmem.Genetic(...)`.
        plan: A `kmem.Plan`, or its path (`.json`), instead of a budget.
        cpu_offload: Whether what is recomputed from may wait in host memory;
            or what travels there in a second (`"12GB"`), else measured.

    Raises:
        ValueError: If a field is not of this form.
    """

    budget: int | float | str = "auto"
    solver: Literal["optimal", "sqrt"] | Genetic = "optimal"
    plan: Plan | str | os.PathLike[str] | None = None
    cpu_offload: bool | int | str = False

    def __post_init__(self):
        if not isinstance(self.cpu_offload, bool):
            size = parse_size(self.cpu_offload, "cpu_offload")
            set_fields(self, cpu_offload=size)
        if self.budget != "auto":
            set_fields(self, budget=budget(self.budget, "remat"))
        if self.cpu_offload:
            one_of(self.solver, "solver with `cpu_offload`", ("optimal",))
        elif not isinstance(self.solver, Genetic):
            one_of(self.solver, "solver", ("optimal", "sqrt"))
        alone = _is_plan(self.plan) and self.budget == "auto"
        if self.plan is not None and (self.cpu_offload or not alone):
            raise ValueError(
                "`plan` must be a `kmem.Plan` or the path of one, and goes "
                "without a budget and `cpu_offload`. Received: plan="
                f"{self.plan!r}, with {self.budget!r}, {self.cpu_offload!r}"
            )


@dataclasses.dataclass(frozen=True)
class DTR:
    """Dynamic tensor rematerialization (Kirisame et al., ICLR 2021).

    Args:
        eviction_threshold: The device's peak that is kept: bytes, or a size
            such as `"5GB"`. 0 is the device's own limit.
        evictee_minimum_size: Bytes, or a size. Smaller tensors are evicted
            only when nothing else is left.
        enable_sqrt_sampling: Look at about the square root of the candidates
            at each eviction.
        heuristic: What is evicted first: `"dtr_eq"`, `"dtr"`, `"ancestors"`,
            `"msps"`, `"local"`, `"size_staleness"`, `"lru"` or `"random"`.
            `"auto"`: what costs least in a simulation of the first step that
            evicts; in `fit`, a step that has no room under one is tried
            under another.
        compile: `"layers"`: in `fit`, a call of a Keras layer runs as one
            operator where that is safe. `(Residual,)`: calls of these classes
            as well, whose `call` must do the same every time, except for the
            values of tensors. `None`: everything runs operator by operator.

    Raises:
        ValueError: If a field is not of this form.
    """

    eviction_threshold: int | str = 0
    evictee_minimum_size: int | str = "1MB"
    enable_sqrt_sampling: bool = False
    heuristic: str = AUTO
    compile: Literal["layers"] | None | tuple[type, ...] = "layers"

    def __post_init__(self):
        for name in ("eviction_threshold", "evictee_minimum_size"):
            value = getattr(self, name)
            if not (is_integer(value) and value == 0):
                set_fields(self, **{name: parse_size(value, name)})
        one_of(self.heuristic, "heuristic", (AUTO, *HEURISTICS))
        if self.compile not in ("layers", None):
            set_fields(self, compile=classes(self.compile, "compile"))


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Each process holds one shard of the training state (FSDP, ZeRO).

    The numbers are those of one process, but for layers that compute from
    several examples at once: batch normalization sees the examples of its own
    process, unless it has `synchronized=True`.

    Args:
        stage: `"optimizer"` (ZeRO-1), `"gradients"` (ZeRO-2) or `"full"`
            (ZeRO-3, FSDP).
        cpu_offload: Keep shards in host memory and update them there.
        gather_dtype: The dtype in which weights are sent, such as
            `"bfloat16"`. `None` is their own.
        reduce_dtype: The dtype in which gradients are sent, likewise.
        units: Names of layers, each gathered as a whole. `None` chooses.
        accumulate: `"sharded"` or `"local"` sums of gradients.

    Raises:
        ValueError: If a field is not of this form.
    """

    stage: Literal["optimizer", "gradients", "full"] = "full"
    cpu_offload: bool = False
    gather_dtype: str | None = None
    reduce_dtype: str | None = None
    units: tuple[str, ...] | None = None
    accumulate: Literal["sharded", "local"] = "sharded"

    def __post_init__(self):
        one_of(self.stage, "sharding", ("full", "gradients", "optimizer"))
        one_of(self.accumulate, "accumulate", ("sharded", "local"))
        dtypes = (None, "float32", "bfloat16", "float16")
        for name in ("gather_dtype", "reduce_dtype"):
            one_of(getattr(self, name), name, dtypes)
        if self.units is not None:
            set_fields(self, units=names(self.units, "units"))


class MemoryArguments(TypedDict, total=False):
    """The memory options, as `fit` takes them; see `kmem.Model.fit`."""

    memory_budget: int | float | str | None
    allow: str | Sequence[str]
    microbatches: int | MicroBatches | None
    gradient_accumulation_steps: int | GradientAccumulation | None
    mixed_precision: Literal["bfloat16", "float16"] | MixedPrecision | None
    remat: int | float | str | os.PathLike[str] | Plan | Remat | None
    dtr: bool | int | str | DTR | None
    sharding: Literal["optimizer", "gradients", "full"] | Sharding | None
    chunked_loss: bool | None
    chunked_attention: bool | None


@dataclasses.dataclass(frozen=True, init=False)
class MemoryOptions:
    """All memory options of a `fit`, parsed.

    Each option is an attribute, which is `None` if the option is off.

    Args:
        **arguments: The options, in the forms that `kmem.Model.fit` takes.

    Raises:
        TypeError: If an option is not known.
        ValueError: If an option is not of one of its forms, or two options
            exclude each other.

    Example:

    ```python
    import kmem

    options = kmem.MemoryOptions(microbatches=4, mixed_precision="bfloat16")
    options.microbatches.count  # 4
    ```
    """

    memory_budget: int | float | None = None
    microbatches: MicroBatches | None = None
    gradient_accumulation_steps: GradientAccumulation | None = None
    mixed_precision: MixedPrecision | None = None
    remat: Remat | None = None
    dtr: DTR | None = None
    sharding: Sharding | None = None
    chunked_loss: bool | None = None
    chunked_attention: bool | None = None
    allow: tuple[str, ...] = ()

    def __init__(self, **arguments: Unpack[MemoryArguments]) -> None:
        _refuse_unknown(arguments, _PARSERS)
        for name, value in arguments.items():
            if value is not None:
                set_fields(self, **{name: _PARSERS[name](value)})
        if self.remat is not None and self.dtr is not None:
            raise ValueError(
                "`remat` and `dtr` exclude each other: both decide what is "
                "recomputed. Give one of them. Received: "
                f"remat={self.remat!r}, dtr={self.dtr!r}"
            )
        if self.memory_budget is not None:
            for name in _CHOSEN:
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"`memory_budget` and `{name}` exclude each other: "
                        "it chooses how a batch is computed. Leave one of "
                        f"them out. Received: {name}={getattr(self, name)!r}"
                    )
        elif self.allow:
            raise ValueError(
                "`allow` must come with `memory_budget`: it tells what may be "
                f"chosen. Received: allow={self.allow!r}"
            )

    def __bool__(self) -> bool:
        return self != MemoryOptions()

    @property
    def allows_xla(self) -> bool:
        """Whether XLA may compile steps: not what is evicted, or sent."""
        return self.dtr is None and self.sharding is None

    @property
    def num_parts(self) -> int:
        """The number of micro-batches of a batch."""
        return self.microbatches.count if self.microbatches else 1

    @property
    def num_batches(self) -> int:
        """The number of batches of an update."""
        steps = self.gradient_accumulation_steps
        return steps.steps if steps else 1


def split_options(
    arguments: dict[str, Any], known: set[str] | None
) -> MemoryOptions:
    """Takes the memory options out of a call's keyword arguments.

    Args:
        arguments: The call's keyword arguments; the options are removed.
        known: The names that the call takes besides; `None` for any.

    Raises:
        TypeError: If a name is neither an option nor known; the nearest name
            is suggested.
        ValueError: As `MemoryOptions`.
    """
    if known is not None:
        _refuse_unknown(arguments, [*_PARSERS, *sorted(known)])
    given = [name for name in arguments if name in _PARSERS]
    return MemoryOptions(**{name: arguments.pop(name) for name in given})


def _refuse_unknown(arguments, known) -> None:
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise TypeError(f"Unexpected keyword argument `{name}`.{hint}")


def _is_plan(value) -> bool:
    """Whether it is a plan, or the path of one."""
    is_path = isinstance(value, str) and value.endswith(".json")
    return is_path or isinstance(value, Plan | os.PathLike)


def _parse_allow(value) -> tuple[str, ...]:
    allowed = names((value,) if isinstance(value, str) else value, "allow")
    for name in allowed:
        one_of(name, "allow", _ALLOWED)
    return allowed


def _parse_switch(value, name: str) -> bool | None:
    """`True`, or `None` of `False`, which is off as well."""
    one_of(value, name, (True, False))
    return bool(value) or None


def _parse_dtr(value) -> DTR | None:
    if isinstance(value, bool):
        return DTR() if value else None
    return _as(DTR, value)


def _as(option: type, value):
    return value if isinstance(value, option) else option(value)


# What `memory_budget` may choose besides.
_ALLOWED = ("mixed_precision", "sharding", "batch_statistics")
# What `memory_budget` decides, or cannot decide beside.
_CHOSEN = ("remat", "dtr")

_PARSERS: dict[str, Callable[[Any], Any]] = {
    "memory_budget": lambda value: budget(value, "memory_budget"),
    "allow": _parse_allow,
    "microbatches": functools.partial(_as, MicroBatches),
    "gradient_accumulation_steps": functools.partial(_as, GradientAccumulation),
    "mixed_precision": functools.partial(_as, MixedPrecision),
    "remat": lambda v: Remat(plan=v) if _is_plan(v) else _as(Remat, v),
    "dtr": _parse_dtr,
    "sharding": functools.partial(_as, Sharding),
    **{
        name: functools.partial(_parse_switch, name=name)
        for name in ("chunked_loss", "chunked_attention")
    },
}
