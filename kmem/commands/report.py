"""`kmem report`: chooses options for a saved model, and draws them.

One step is trained on random data. The file is left as it is.
"""

import argparse
import pathlib
from typing import Any

from kmem.commands import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> int:
    """Draws what is chosen for the budget; 0 if something can be."""
    import keras

    from kmem.model import wrap
    from kmem.reporting import report
    from kmem.step import batches

    model, batch = arguments.load_model(args)
    keras.utils.set_random_seed(0)  # Of the random data.
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batches.random_data(batch))
    trained: Any = wrap(model)
    trained.fit(
        x, y, batch_size=args.batch, memory_budget=args.budget, verbose=1
    )
    report(model, args.output, args.log_dir)
    print(f"drawn: {args.output}")
    return 0
