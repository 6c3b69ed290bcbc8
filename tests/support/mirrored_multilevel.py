"""Trains programs on two replicas; prints their errors against one device.

A process of its own: the logical devices must be set before TensorFlow starts.
"""

import json

import keras
import numpy as np
from keras import layers
from mirrored import make_strategy
from multilevel_cases import relative_error
from multilevel_cases import train
from multilevel_cases import two_levels

from kmem.multilevel import ConjugateGradient
from kmem.multilevel import Identity

LOWER = {
    "Identity": {
        "hypergradient": Identity(),
        "gradient_accumulation_steps": 2,
        "microbatches": 2,
    },
    "ConjugateGradient": {
        "hypergradient": ConjugateGradient(2),
        "clipnorm": 1e-2,
        "remat": "auto",
    },
}
NOISE = {"hypergradient": Identity(), "microbatches": 2}


def reduced_by_keras(case):
    """The same mean, which Keras divides by the number of replicas."""
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, dtype="float64"
    )
    upper = case.program.levels[1]
    upper.loss = lambda x, y: loss(y, case.classifier(x, training=True))
    return case


def main():
    strategy = make_strategy()
    results = {}
    for name, lower in LOWER.items():
        want, logs = train(case=reduced_by_keras(two_levels(lower=lower)))
        with strategy.scope():
            case = reduced_by_keras(two_levels(lower=lower))
        got, found = train(case=case)
        results[name] = (
            max(map(relative_error, got, want)),
            max(relative_error(found[key], logs[key]) for key in logs),
        )
    # Replicas draw and keep their own, but all of it is given back.
    with strategy.scope():
        block = [
            layers.BatchNormalization(dtype="float64"),
            layers.Dropout(0.2, dtype="float64"),
        ]
        case = two_levels(lower=NOISE, block=block)
    weights, _ = train(case=case, epochs=1)
    results["finite"] = bool(all(np.all(np.isfinite(w)) for w in weights))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
