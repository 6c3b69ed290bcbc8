"""`kmem plan`: plans a saved model's training step."""

import argparse
import pathlib
from typing import Any

import keras
import tensorflow as tf

from kmem.planner import plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example: kmem plan model.keras --batch 32 --budget 2GB "
        "--plot plan.png --output plan.json"
    )
    parser.add_argument("model", type=pathlib.Path, help="a .keras file")
    parser.add_argument(
        "--batch",
        type=int,
        required=True,
        metavar="ROWS",
        help="the number of rows of a batch",
    )
    parser.add_argument(
        "--budget",
        default="auto",
        help='the peak of a step: "2GB", a share such as 0.5 of the '
        'unplanned peak, or "auto" (default)',
    )
    parser.add_argument(
        "--solver", choices=("optimal", "sqrt"), default="optimal"
    )
    parser.add_argument(
        "--costs",
        choices=("measured", "flops"),
        default="measured",
        help="where times come from (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        metavar="PATH",
        help="where to save the plan, for fit(remat=PATH)",
    )
    parser.add_argument(
        "--plot", type=pathlib.Path, metavar="PATH", help="where to draw it"
    )


def run(args: argparse.Namespace) -> int:
    """Prints a plan; 0 if there is one."""
    for path in (args.output, args.plot):
        # Now, rather than after the work is done.
        if path is not None and not path.parent.is_dir():
            raise ValueError(
                f"A path must be in a folder that exists. Received: {path}"
            )
    if args.batch < 1:
        raise ValueError(
            "`--batch` must be a positive number of rows. "
            f"Received: {args.batch}"
        )
    model: Any = keras.saving.load_model(args.model)
    made = plan(
        model,
        _batch(model, args.batch),
        _budget(args.budget),
        solver=args.solver,
        costs=args.costs,
        verbose=1,
    )
    print(made.summary())
    if args.output is not None:
        made.save(args.output)
        print(f"saved: {args.output}")
    if args.plot is not None:
        made.plot(args.plot)
        print(f"drawn: {args.plot}")
    return 0


def _budget(text: str) -> float | str:
    """A share is a plain number; the rest is parsed as everywhere."""
    try:
        return float(text)
    except ValueError:
        return text


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
