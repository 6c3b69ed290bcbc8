"""What the command line's arguments may be, and the model that they name.

What is wrong with one is said while the command line is read, before any work:
the exit code is 2 then. An error of another kind would lose its text there.
"""

import argparse
import contextlib
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

from kmem.base.sizes import parse_size

# What matplotlib draws without a program besides.
PICTURES = (".png", ".svg", ".pdf")


class WrongArgumentError(ValueError):
    """An argument is seen to be wrong only when the command runs: a file is
    there, but is not what it reads."""

    exit_code = 2


def _must(is_right: bool, text: str, rule: str) -> None:
    """Refuses an argument that is not as the rule says."""
    if not is_right:
        raise argparse.ArgumentTypeError(f"must {rule}. Received: {text}")


def positive(text: str) -> int:
    """How many."""
    is_positive = text.isdecimal() and int(text) > 0
    _must(is_positive, text, "be a positive integer")
    return int(text)


def seed(text: str) -> int:
    """What random numbers begin with."""
    fits = text.isdecimal() and int(text) < 2**64
    _must(fits, text, "be an integer from 0 to 2**64 - 1")
    return int(text)


def existing_file(text: str) -> pathlib.Path:
    """What is read."""
    path = pathlib.Path(text)
    _must(path.is_file(), text, "be a file that exists")
    return path


def output_file(text: str) -> pathlib.Path:
    """What is written to."""
    path = pathlib.Path(text)
    can_be = not path.is_dir() and path.parent.is_dir()
    _must(can_be, text, "be a file in a folder that exists")
    return path


def file_ending(*endings: str) -> Callable[[str], pathlib.Path]:
    """What is written to, in a format that its ending says."""

    def file(text: str) -> pathlib.Path:
        path = output_file(text)
        ends = path.suffix.lower() in endings
        _must(ends, text, f"end in {' or '.join(endings)}")
        return path

    return file


def add_plot(parser: argparse.ArgumentParser) -> None:
    """Where to draw what is found."""
    parser.add_argument(
        "--plot",
        type=file_ending(*PICTURES),
        metavar="PATH",
        help="where to draw it",
    )


def draw(found: Any, args: argparse.Namespace) -> None:
    """Draws it there, if it was asked for."""
    if args.plot is not None:
        found.plot(args.plot)
        print(f"drawn: {args.plot}")


def share_or_size(text: str) -> float | int:
    """Bytes as everywhere; a plain number is a share of a peak."""
    with contextlib.suppress(ValueError):
        return parse_size(text)
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(
        "must be a size such as 500MB, 2GB or 2GiB, or a share above 0 and at "
        f"most 1. Received: {text}"
    )


def add_model_and_batch(parser: argparse.ArgumentParser) -> None:
    """The model's file, and the batch size."""
    add_model(parser)
    parser.add_argument(
        "--batch",
        type=positive,
        required=True,
        metavar="SIZE",
        help="the batch size",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model's file."""
    parser.add_argument(
        "model",
        type=existing_file,
        help="a .keras file, of layers of Keras's own",
    )


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model, and its batch as `tf.TensorSpec`s, if Keras alone can load the
    file and tell the batch's shape."""
    import keras

    try:
        with warnings.catch_warnings():
            # One that has not trained has no variables to be loaded.
            warnings.filterwarnings("ignore", "Skipping variable loading")
            model = keras.saving.load_model(args.model)
    except Exception as error:  # Whatever the file leads Keras to.
        first_sentence = str(error).strip().partition("\n")[0].split(". ")[0]
        raise WrongArgumentError(
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
    import tensorflow as tf

    from kmem.step import batches

    if not model.built:
        raise WrongArgumentError(
            "The model in the file must be built: begin it with "
            f"`keras.Input(shape)`, or call it. Received: model={model.name}"
        )
    sequential = isinstance(model, keras.Sequential)
    inputs = model.inputs[0] if sequential else model.input
    outputs = model.outputs[0] if sequential else model.output
    specs = batches.specs_of(inputs)
    if model.compiled:
        targets = batches.specs_of(outputs)
        flat = keras.tree.flatten(targets)
        losses: Any = getattr(model, "loss", None)
        if isinstance(losses, dict):
            names = getattr(model, "output_names", losses)
            names = sorted(outputs) if isinstance(outputs, dict) else names
            losses = [losses.get(name) for name in names]
        if not isinstance(losses, list | tuple):
            losses = [losses] * len(flat)
        flat = [
            tf.TensorSpec([None, *target.shape[1:-1]], tf.int64)
            if "sparse" in str(loss).lower()
            else target
            for target, loss in zip(flat, losses, strict=True)
        ]
        targets = keras.tree.pack_sequence_as(targets, flat)
        specs = specs, targets
    for spec in keras.tree.flatten(specs):
        if None in spec.shape[1:]:
            raise WrongArgumentError(
                "The model's inputs and outputs must have a fixed shape, "
                f"except the batch size. Received: shape={spec.shape}"
            )
    return batches.with_rows(specs, rows)
