"""A model from a file, and what it trains on: for commands."""

import argparse
import pathlib
from typing import Any

import keras
import tensorflow as tf


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, and the number of rows of a batch."""
    parser.add_argument("model", type=pathlib.Path, help="a .keras file")
    parser.add_argument(
        "--batch",
        type=positive,
        required=True,
        metavar="ROWS",
        help="the number of rows of a batch",
    )


def load(args: argparse.Namespace) -> tuple[keras.Model, Any]:
    """The model, and its batch as `tf.TensorSpec`s.

    Raises:
        ValueError: If the batch's shape cannot be told.
    """
    model: Any = keras.saving.load_model(args.model)
    return model, _batch(model, args.batch)


def positive(text: str) -> int:
    """For `add_argument(type=...)`."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(
            f"must be a positive integer. Received: {text}"
        )
    return int(text)


def check_output(path: pathlib.Path | None) -> None:
    """Checks a path that is written to, before the work is done."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(
            f"A path must be in a folder that exists. Received: {path}"
        )


def _batch(model, rows: int):
    """The shapes of the model's inputs, and of targets for its loss.

    A file does not tell what its targets look like: they are taken to be
    like the predictions, or to be classes where the loss is a sparse one.
    """
    sequential = isinstance(model, keras.Sequential)
    inputs = model.inputs[0] if sequential else model.input
    outputs = model.outputs[0] if sequential else model.output
    specs = keras.tree.map_structure(
        lambda t: _spec(t.shape, t.dtype, rows), inputs
    )
    if not model.compiled:
        return specs
    sparse = "sparse" in str(getattr(model, "loss", "")).lower()

    def target(output):
        if sparse:
            return _spec(output.shape[:-1], "int64", rows)
        return _spec(output.shape, output.dtype, rows)

    return specs, keras.tree.map_structure(target, outputs)


def _spec(shape, dtype: str, rows: int) -> tf.TensorSpec:
    if any(size is None for size in shape[1:]):
        raise ValueError(
            "The model's inputs and outputs must have a fixed shape but for "
            f"the number of rows. Received: shape={shape}"
        )
    return tf.TensorSpec([rows, *shape[1:]], dtype)
