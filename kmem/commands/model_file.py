"""A model from a file, and what it trains on: for commands."""

import argparse
import warnings
from typing import TYPE_CHECKING
from typing import Any

from kmem.commands import arguments

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, and the batch size."""
    add_file(parser)
    parser.add_argument(
        "--batch",
        type=arguments.positive,
        required=True,
        metavar="SIZE",
        help="the batch size",
    )


def add_file(parser: argparse.ArgumentParser) -> None:
    """The file."""
    parser.add_argument(
        "model",
        type=arguments.existing_file,
        help="a .keras file, of layers of Keras's own",
    )


def load(args: argparse.Namespace) -> "tuple[keras.Model, Any]":
    """The model, and its batch as `tf.TensorSpec`s.

    Raises:
        WrongFileError: If the file is no model that Keras alone can load, or
            if the batch's shape cannot be told.
    """
    import keras

    try:
        with warnings.catch_warnings():
            # One that has not trained has no variables to be loaded.
            warnings.filterwarnings("ignore", "Skipping variable loading")
            model: Any = keras.saving.load_model(args.model)
    except Exception as error:  # Whatever the file leads Keras to.
        first_sentence = str(error).strip().partition("\n")[0].split(". ")[0]
        raise arguments.WrongFileError(
            "A model's file must be one that `model.save` wrote and that Keras "
            "can load without your code. For a model with code of your own, "
            f"use Python. Received: {args.model} ({first_sentence})"
        ) from error
    return model, _batch(model, args.batch)


def _batch(model, rows: int):
    """The shapes of the model's inputs, and of targets for its loss.

    A file does not tell what its targets look like: they are taken to be
    like the predictions, or to be classes where the loss is a sparse one.
    """
    import keras

    if not model.built:
        raise arguments.WrongFileError(
            "The model in the file must be built: begin it with "
            f"`keras.Input(shape)`, or call it. Received: model={model.name}"
        )
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


def _spec(shape, dtype: str, rows: int) -> "tf.TensorSpec":
    import tensorflow as tf

    if any(size is None for size in shape[1:]):
        raise arguments.WrongFileError(
            "The model's inputs and outputs must have a fixed shape, except "
            f"the batch size. Received: shape={shape}"
        )
    return tf.TensorSpec([rows, *shape[1:]], dtype)
