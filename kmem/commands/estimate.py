"""`kmem estimate`: what a saved model's training step is going to need."""

import argparse

from kmem.commands import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example: kmem estimate model.keras --batch 256 --plot it.png"
    )
    arguments.add_model_and_batch(parser)
    arguments.add_plot(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the estimate."""
    from kmem.budget.estimate import estimate

    found = estimate(*arguments.load_model(args))
    print(found.summary())
    arguments.draw(found, args)
    return 0
