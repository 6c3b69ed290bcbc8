"""How Python calls the native library: every signature, and every struct.

ctypes knows neither: it cuts a pointer off that is not declared as one, and
reads past the end of a struct that is longer here than there. So nothing is
called before `declare`, which compares the sizes with the library's own.
"""

import ctypes
from typing import Any

_INT = ctypes.c_int64
_POINTER = ctypes.c_void_p
_TEXT = ctypes.c_char_p
_DEVICE = ctypes.c_int

# The number of a device: that of GPU i is i + 1.
CPU = 0

# Who cuts a pool, in the order of custom_ops/memory/pool.h.
NO_POOL, OWN_POOL, BFC_POOL = range(3)

# Of DTR, in the order of custom_ops/dtr/heuristic.h.
HEURISTICS = tuple(
    "dtr_eq dtr ancestors msps local size_staleness lru random".split()
)
# The best of them for a recorded step, by custom_ops/dtr/choose.h.
AUTO = "auto"


class Stats(ctypes.Structure):
    """`KmemStats` in custom_ops/memory/bindings.cc: bytes, and a number."""

    _fields_ = [
        ("in_use", _INT),
        ("peak", _INT),
        # Below 0: no limit.
        ("limit", _INT),
        ("largest", _INT),
        ("num_allocations", _INT),
        # The size of the request that was refused last; 0 if none was.
        ("refused", _INT),
        # Freed, and kept to be used again: not in use, nor the system's yet.
        ("cached", _INT),
        # What TensorFlow takes of a device; 0 if that is not known.
        ("size", _INT),
    ]


class PoolUsage(ctypes.Structure):
    """`PoolUsage` in custom_ops/memory/pool.h."""

    _fields_ = [
        (name, _INT)
        for name in ("size", "blocks", "chunks", "peak_chunks", "largest_free")
    ]


class Options(ctypes.Structure):
    """`Options` in custom_ops/dtr/runtime.h.

    A number that does not fit in its field is refused, not cut off.
    """

    _fields_ = [
        ("threshold_bytes", _INT),
        ("evictee_minimum_bytes", _INT),
        ("recomputation_limit", _INT),
        ("sqrt_sampling", ctypes.c_bool),
        ("seed", ctypes.c_uint64),
    ]

    def __init__(self, **fields: int):
        super().__init__(**fields)
        for name, value in fields.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"`{name}` must fit in 64 bits. Received: {name}={value}"
                )


class Statistics(ctypes.Structure):
    """`Statistics` in custom_ops/dtr/runtime.h."""

    _fields_ = [
        (name, _INT)
        for name in (
            *("live_bytes", "peak_bytes", "pinned_bytes", "num_operators"),
            *("num_evictions", "num_recomputations"),
            *("recomputed_nanoseconds", "total_nanoseconds"),
            *("num_accesses", "least_threshold_bytes"),
        )
    ]


# By the function that tells its size.
STRUCTS = {
    "kmem_stats_bytes": Stats,
    "kmem_pool_usage_bytes": PoolUsage,
    "kmem_dtr_options_bytes": Options,
    "kmem_dtr_statistics_bytes": Statistics,
}
_OPTIONS = ctypes.POINTER(Options)
_STATISTICS = ctypes.POINTER(Statistics)
# What each function gives, and what it takes.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(STRUCTS, (_INT,)),
    "kmem_register_allocator": (ctypes.c_bool,),
    "kmem_stats": (None, _DEVICE, ctypes.POINTER(Stats)),
    "kmem_set_limit": (ctypes.c_bool, _DEVICE, _INT),
    "kmem_ask_for_pool": (ctypes.c_bool, _DEVICE, ctypes.c_int, _INT),
    "kmem_pool_kind": (ctypes.c_int, _DEVICE),
    "kmem_pool_usage": (ctypes.c_bool, _DEVICE, ctypes.POINTER(PoolUsage)),
    "kmem_begin_recording": (None, _DEVICE),
    "kmem_end_recording": (ctypes.c_bool, _DEVICE, _TEXT),
    "kmem_end_recording_in_pool": (_INT, _DEVICE, ctypes.c_int),
    "kmem_live_peak": (_INT, _POINTER, _INT),
    "kmem_least_pool": (_INT, ctypes.c_int, _POINTER, _INT),
    "kmem_reset_peak": (None, _DEVICE),
    "kmem_open_watermark": (ctypes.c_int, _DEVICE),
    "kmem_watermark": (_INT, _DEVICE, ctypes.c_int),
    "kmem_close_watermark": (None, _DEVICE, ctypes.c_int),
    "kmem_keep_places": (_INT, _TEXT),
    "kmem_forget_places": (None, _INT),
    "kmem_dtr_register": (ctypes.c_bool, _POINTER, _TEXT, _INT),
    "kmem_dtr_new_session": (_POINTER, _POINTER, _TEXT, _OPTIONS),
    "kmem_dtr_delete_session": (None, _POINTER),
    "kmem_dtr_begin": (ctypes.c_bool, _POINTER, _INT, ctypes.c_bool),
    "kmem_dtr_end": (_INT, ctypes.c_bool),
    "kmem_dtr_heuristic": (None, _POINTER, _TEXT, _INT),
    "kmem_dtr_begin_trace": (ctypes.c_bool, _POINTER, _TEXT),
    "kmem_dtr_end_trace": (None, _POINTER),
    "kmem_dtr_statistics": (None, _POINTER, _STATISTICS),
    "kmem_dtr_simulate": (
        *(ctypes.c_int, _POINTER, _INT, _TEXT),
        *(_OPTIONS, _INT, _STATISTICS, _TEXT, _INT),
    ),
}


def declare(library: ctypes.CDLL) -> None:
    """Gives the library's functions their signatures; an `OSError` if it lacks
    one, or has a struct of another size."""
    for name, (result, *arguments) in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise OSError(f"it has no function {name}") from error
        function.restype, function.argtypes = result, arguments
    for name, struct in STRUCTS.items():
        expected, actual = ctypes.sizeof(struct), getattr(library, name)()
        if actual != expected:
            raise OSError(
                f"{name}() is {actual}, and {struct.__name__} has {expected} "
                "bytes in Python"
            )


def pointer_in(capsule: Any) -> int:
    """The address that a capsule of Python's holds."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = _POINTER, [ctypes.py_object, _TEXT]
    return get(capsule, None)
