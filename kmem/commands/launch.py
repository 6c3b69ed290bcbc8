"""`kmem launch`: runs a script in several processes that train together."""

import argparse
import os
import sys

from kmem.commands import arguments


def add_launch(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    parser.epilog = (
        "Example: kmem launch --processes 2 train.py --epochs 10. Under "
        "`srun`, or where TF_CONFIG names several workers, the script runs "
        "once in each process that the cluster has started."
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="how many, each with a GPU of its own on a machine that has some "
        "(default: one for each GPU)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="K",
        help="how often to start all of them again after one has failed; the "
        "script is to go on from its last checkpoint (default: %(default)s)",
    )
    parser.add_argument(
        "--network",
        choices=("private", "host"),
        default="private",
        help="private: one that only these processes are in, without the "
        "internet, as TensorFlow's server listens on every interface; host: "
        "this machine's (default: %(default)s)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="what the others are given to end once one has failed "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "script", type=arguments.existing_file, help="the Python file to run"
    )
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="what the script gets",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the script; 0 unless a rank fails, whose exit code is told."""
    from kmem import distributed
    from kmem.launching import cluster
    from kmem.launching import ranks

    try:
        distributed.check(args.restarts, args.network, args.grace)
        if cluster.join(os.environ):
            os.environ[cluster.LAUNCHED] = "1"
            command = [sys.executable, str(args.script), *args.arguments]
            os.execv(sys.executable, command)
        gpus = distributed.visible_gpus()
        num_processes = distributed.how_many(args.processes, gpus)
    except ValueError as error:
        raise arguments.WrongArgumentError(str(error)) from error
    ranks.run(
        {"script": str(args.script), "arguments": args.arguments},
        num_processes,
        gpus,
        args.restarts,
        args.network == "private",
        args.grace,
    )
    return 0
