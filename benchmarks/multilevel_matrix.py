"""How exact gradients through a level are, for layers and memory options.

    python benchmarks/multilevel_matrix.py --output multilevel_matrix.md

The relative error of each hypergradient against what central differences of
first derivatives say in float64, with the layers in float64; under bfloat16
they are in float32 otherwise, and the oracle is the plain one. With
micro-batches the oracle goes through the same parts: batch normalization sees
one part at a time, and dropout draws anew for each. The cases are those of
tests/multilevel/test_multilevel_matrix.py.
"""

import argparse
import pathlib
import sys

from table import add_output
from table import made_by
from table import writer

SUPPORT = pathlib.Path(__file__).resolve().parents[1] / "tests" / "support"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_output(parser)
    arguments = parser.parse_args()
    sys.path.insert(0, str(SUPPORT))
    from multilevel_matrix import HYPERGRADIENTS
    from multilevel_matrix import LAYERS
    from multilevel_matrix import OPTIONS
    from multilevel_matrix import errors

    explained = " ".join(__doc__.split(".md\n")[1].split())
    columns = " | ".join(f"`{name}`" for name in HYPERGRADIENTS)
    write = writer(
        arguments.output,
        "# Gradients through a level, by layers and options\n\n"
        f"{made_by(__file__)}\n\n{explained}\n\n"
        f"| layer | options | {columns} |\n"
        f"|{'---|' * (len(HYPERGRADIENTS) + 2)}\n",
    )
    for kind in LAYERS:
        for option in OPTIONS:
            found = errors(kind, option)
            cells = " | ".join(f"{found[name]:.0e}" for name in HYPERGRADIENTS)
            write(f"| {kind} | {option} | {cells} |\n")


if __name__ == "__main__":
    main()
