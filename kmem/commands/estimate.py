"""`kmem estimate`: what a saved model's training step is going to need."""

import argparse

from kmem.commands import model_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Example: kmem estimate model.keras --batch 256"
    model_file.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the estimate."""
    from kmem.budget.estimate import estimate

    model, batch = model_file.load(args)
    print(estimate(model, batch).summary())
    return 0
