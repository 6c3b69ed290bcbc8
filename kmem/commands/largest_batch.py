"""`kmem largest-batch`: the largest batch with which a saved model trains."""

import argparse

from kmem.base.sizes import parse_size
from kmem.commands import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Example: kmem largest-batch model.keras --memory 8GB"
    arguments.add_model(parser)
    parser.set_defaults(batch=1)
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


def run(args: argparse.Namespace) -> int:
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
