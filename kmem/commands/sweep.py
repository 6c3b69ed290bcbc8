"""`kmem sweep`: tries a saved model at several thresholds of DTR."""

import argparse

from kmem.commands import arguments
from kmem.commands import model_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example: kmem sweep model.keras --batch 32 --thresholds 0.8 0.6 2GB "
        "--plot sweep.png"
    )
    model_file.add_arguments(parser)
    parser.add_argument(
        "--thresholds",
        nargs="+",
        type=arguments.share_or_size,
        metavar="THRESHOLD",
        help='peaks to keep: "2GB", or shares such as 0.5 of plain eager '
        "training's peak (default: six shares from 1.0 to 0.3)",
    )
    parser.add_argument(
        "--steps",
        type=arguments.positive,
        default=4,
        help="how many to take at each threshold (default: %(default)s)",
    )
    parser.add_argument(
        "--plot",
        type=arguments.picture_file,
        metavar="PATH",
        help="where to draw it",
    )


def run(args: argparse.Namespace) -> int:
    """Prints what the thresholds cost; 0 once they were tried."""
    import keras

    from kmem.budget.sweeper import sweep
    from kmem.step import batches

    model, batch = model_file.load(args)
    keras.utils.set_random_seed(0)  # Of the random data.
    results = sweep(
        model,
        batches.random_data(batch),
        args.thresholds,
        steps=args.steps,
        verbose=1,
    )
    print(results.summary())
    if args.plot is not None:
        results.plot(args.plot)
        print(f"drawn: {args.plot}")
    return 0
