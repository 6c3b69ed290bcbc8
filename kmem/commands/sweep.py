"""`kmem sweep`: tries a saved model at several thresholds of DTR."""

import argparse

from kmem.commands import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example: kmem sweep model.keras --batch 32 --thresholds 0.8 0.6 2GB "
        "--plot sweep.png"
    )
    arguments.add_model_and_batch(parser)
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
    arguments.add_plot(parser)


def run(args: argparse.Namespace) -> int:
    """Prints what the thresholds cost; 0 once they were tried."""
    import keras

    from kmem.budget.sweeper import sweep
    from kmem.dtr.sweep import check_points
    from kmem.step import batches

    # Before minutes of work.
    if args.plot is not None and args.thresholds is not None:
        check_points(args.thresholds)

    model, batch = arguments.load_model(args)
    keras.utils.set_random_seed(0)  # Of the random data.
    data = batches.random_data(batch)
    results = sweep(model, data, args.thresholds, steps=args.steps, verbose=1)
    print(results.summary())
    arguments.draw(results, args)
    return 0
