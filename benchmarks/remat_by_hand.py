"""Checkpointing as one writes it by hand: about sqrt(n) equal segments.

The layers of a Functional model, in order, are cut into segments of nearly
equal length, where the fewest tensors cross. Each is a model of its own, and
all but the last are called through `tf.recompute_grad`. It needs layers that
are called once. What `tf.recompute_grad` does to dropout and to the averages
of batch normalization stays as it is.
"""

import functools
import itertools
import math

import keras
import tensorflow as tf


class ByHand(keras.Model):
    """A Functional model with one input and output, run by segments."""

    def __init__(self, model):
        super().__init__()
        self.calls = _segments(model)

    def call(self, inputs, training=None):
        values = {self.calls[0][0][0]: inputs}
        for reads, makes, segment in self.calls:
            run = functools.partial(_run, segment, training)
            if segment is not self.calls[-1][-1]:
                run = tf.recompute_grad(run)
            outputs = run(*[values[key] for key in reads])
            values.update(zip(makes, outputs, strict=True))
        return outputs[0]


def _run(segment, training, *tensors):
    return keras.tree.flatten(segment(list(tensors), training=training))


def _segments(model):
    """For each segment: the tensors it reads and makes, and its model."""
    layers = [
        (keras.tree.flatten(layer.input), keras.tree.flatten(layer.output))
        for layer in model.operations
        if not isinstance(layer, keras.layers.InputLayer)
    ]
    maker, last_reader = {}, {id(t): len(layers) for t in model.outputs}
    for index, (reads, makes) in enumerate(layers):
        maker.update({id(t): index for t in makes})
        for tensor in reads:
            maker.setdefault(id(tensor), -1)
            last = last_reader.get(id(tensor), 0)
            last_reader[id(tensor)] = max(last, index)

    def num_crossing(place):
        return sum(
            index < place <= last_reader[key] for key, index in maker.items()
        )

    length = math.sqrt(len(layers))
    places = [0]
    for number in range(1, round(len(layers) / length)):
        target = round(number * length)
        near = round(length / 3)
        places.append(
            min(
                range(target - near, target + near + 1),
                key=lambda p, t=target: (num_crossing(p), abs(p - t)),
            )
        )
    parts = []
    for start, stop in itertools.pairwise([*places, len(layers)]):
        read = {id(t): t for reads, _ in layers[start:stop] for t in reads}
        made = {id(t): t for _, makes in layers[start:stop] for t in makes}
        reads = {k: t for k, t in read.items() if maker[k] < start}
        makes = {k: t for k, t in made.items() if last_reader[k] >= stop}
        parts.append((reads, makes))
    return [
        (
            tuple(reads),
            tuple(makes),
            keras.Model(list(reads.values()), list(makes.values())),
        )
        for reads, makes in parts
    ]
