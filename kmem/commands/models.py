"""The commands about a saved model: what a training step of it needs, what is
planned, chosen or measured for it.

Its file is left as it is; where steps are taken, it is on random data.
"""

import argparse
import pathlib
from typing import Any

from kmem.base.sizes import parse_size
from kmem.commands import arguments


def add_estimate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_estimate)
    parser.epilog = (
        "Example: kmem estimate model.keras --batch 256 --plot it.png"
    )
    arguments.add_model_and_batch(parser)
    arguments.add_plot(parser)


def _estimate(args: argparse.Namespace) -> int:
    """Prints the estimate."""
    from kmem.budget.estimate import estimate

    found = estimate(*arguments.load_model(args))
    print(found.summary())
    arguments.draw(found, args)
    return 0


def add_largest_batch(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_largest_batch, batch=1)
    parser.epilog = "Example: kmem largest-batch model.keras --memory 8GB"
    arguments.add_model(parser)
    parser.add_argument(
        "--memory",
        type=_size,
        help="what the device may have in use (default: all of it)",
    )
    parser.add_argument(
        "--multiple-of",
        type=arguments.positive,
        default=8,
        help="what the batch size is a multiple of (default: %(default)s)",
    )
    parser.add_argument(
        "--microbatches",
        type=arguments.positive,
        help="with so many micro-batches",
    )
    parser.add_argument(
        "--mixed-precision", choices=("bfloat16", "float16"), help="in 16 bits"
    )


def _largest_batch(args: argparse.Namespace) -> int:
    """Prints the batch size; 0 if there is one."""
    from kmem.budget.largest import largest_batch

    model, batch = arguments.load_model(args)
    found = largest_batch(
        model,
        batch,
        args.memory,
        args.multiple_of,
        microbatches=args.microbatches,
        mixed_precision=args.mixed_precision,
    )
    print(found.summary())
    return 0 if found.batch_size else 1


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_plan)
    parser.epilog = (
        "Example: kmem plan model.keras --batch 32 --budget 2GB "
        "--plot plan.png --output plan.json"
    )
    arguments.add_model_and_batch(parser)
    parser.add_argument(
        "--budget",
        type=_budget,
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
        type=arguments.file_ending(".json"),
        metavar="PATH",
        help="where to save the plan, as .json, for fit(remat=PATH)",
    )
    arguments.add_plot(parser)


def _plan(args: argparse.Namespace) -> int:
    """Prints a plan; 0 if there is one."""
    from kmem.budget.planner import plan

    model, batch = arguments.load_model(args)
    how = {"solver": args.solver, "costs": args.costs, "verbose": 1}
    best = plan(model, batch, args.budget, **how)
    print(best.summary())
    if args.output is not None:
        best.save(args.output)
        print(f"saved: {args.output}")
    arguments.draw(best, args)
    return 0


def _budget(text: str) -> float | int | str:
    return text if text == "auto" else arguments.share_or_size(text)


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_report)
    parser.epilog = (
        "Example: kmem report model.keras --batch 32 --budget 2GB "
        "--output report.html"
    )
    arguments.add_model_and_batch(parser)
    parser.add_argument(
        "--budget",
        type=arguments.share_or_size,
        required=True,
        help='the peak of a step: "2GB", or a share such as 0.5 of the device',
    )
    parser.add_argument(
        "--output",
        type=arguments.output_file,
        default=pathlib.Path("report.html"),
        metavar="PATH",
        help="where to write the page; the pictures lie beside it "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--log-dir",
        type=pathlib.Path,
        metavar="FOLDER",
        help="a folder of TensorBoard's for the pictures as well",
    )


def _report(args: argparse.Namespace) -> int:
    """Draws what is chosen for the budget; 0 if something can be."""
    import keras

    from kmem.model import wrap
    from kmem.reporting import report

    model, data = _model_and_data(args)
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    trained: Any = wrap(model)
    trained.fit(
        x, y, batch_size=args.batch, memory_budget=args.budget, verbose=1
    )
    report(model, args.output, args.log_dir)
    print(f"drawn: {args.output}")
    return 0


def add_sweep(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_sweep)
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


def _sweep(args: argparse.Namespace) -> int:
    """Prints what the thresholds cost; 0 once they were tried."""
    from kmem.budget.sweeper import sweep
    from kmem.dtr.sweep import check_points

    # Before minutes of work.
    if args.plot is not None and args.thresholds is not None:
        check_points(args.thresholds)
    model, data = _model_and_data(args)
    results = sweep(model, data, args.thresholds, steps=args.steps, verbose=1)
    print(results.summary())
    arguments.draw(results, args)
    return 0


def _model_and_data(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model, and random data of its batch, always the same."""
    import keras

    from kmem.step import batches

    model, batch = arguments.load_model(args)
    keras.utils.set_random_seed(0)
    return model, batches.random_data(batch)
