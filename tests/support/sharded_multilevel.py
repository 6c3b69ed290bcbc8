"""Trains programs of two levels in shards, in each of several processes."""

import numpy as np
from multilevel_cases import relative_error
from multilevel_cases import train
from multilevel_cases import two_levels

import kmem
from kmem.multilevel import ConjugateGradient
from kmem.multilevel import Identity

# Of 7 rows: two processes take 3 and 4, in parts.
CASES = {
    "float64": (
        {"sharding": "gradients"},
        {"lower": {"hypergradient": Identity(), "microbatches": 2}},
    ),
    "float32": (
        {"sharding": "optimizer"},
        {
            "lower": {"hypergradient": ConjugateGradient(2), "roll_back": True},
            "upper": {"clipnorm": 1e-2},
        },
    ),
}


def errors():
    """The largest errors of the weights, and of the logs, of each case."""
    results = {}
    for dtype, (options, case) in CASES.items():
        one, several = (
            two_levels(batch=7, dtype=dtype, **case) for _ in range(2)
        )
        want, logs = train(case=one, epochs=1)
        got, found = train(case=several, epochs=1, **options)
        results[dtype] = (
            max(map(relative_error, got, want)),
            max(np.max(np.abs(relative_log(found, logs, key))) for key in logs),
        )
    return results


def relative_log(found, logs, key):
    return np.divide(found[key], logs[key]) - 1


def main():
    """Joins the other processes, and returns the errors."""
    kmem.ShardedStrategy()
    return errors()
