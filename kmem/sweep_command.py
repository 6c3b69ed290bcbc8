"""`kmem sweep`: tries a saved model at several thresholds of DTR."""

import argparse
import pathlib

import keras

from kmem import batches
from kmem import model_file
from kmem.sweeper import SHARES
from kmem.sweeper import sweep
from kmem.units import parse_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example: kmem sweep model.keras --batch 32 --thresholds 0.8 0.6 2GB "
        "--plot sweep.png"
    )
    model_file.add_arguments(parser)
    parser.add_argument(
        "--thresholds",
        nargs="+",
        type=_threshold,
        metavar="THRESHOLD",
        help='peaks to keep: "2GB", or shares such as 0.5 of plain eager '
        f"training's peak (default: {' '.join(map(str, SHARES))})",
    )
    parser.add_argument(
        "--steps",
        type=model_file.positive,
        default=4,
        help="how many to take at each threshold (default: %(default)s)",
    )
    parser.add_argument(
        "--plot", type=pathlib.Path, metavar="PATH", help="where to draw it"
    )


def run(args: argparse.Namespace) -> int:
    """Prints what the thresholds cost; 0 once they were tried."""
    model_file.check_output(args.plot)
    model, batch = model_file.load(args)
    keras.utils.set_random_seed(0)  # Of the numbers that are made up.
    found = sweep(
        model,
        batches.made_up(batch),
        args.thresholds,
        steps=args.steps,
        verbose=1,
    )
    print(found.summary())
    if args.plot is not None:
        found.plot(args.plot)
        print(f"drawn: {args.plot}")
    return 0


def _threshold(text: str) -> float | int:
    """A share is a plain number; the rest is parsed as everywhere."""
    try:
        share = float(text)
    except ValueError:
        return _size(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(
            "must be a size, or a share above 0 and at most 1. "
            f"Received: {text}"
        )
    return share


def _size(text: str) -> int:
    try:
        return parse_size(text, "--thresholds")
    except ValueError as error:
        # The text of another error would not reach the user.
        raise argparse.ArgumentTypeError(str(error)) from error
