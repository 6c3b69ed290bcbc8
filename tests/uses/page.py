"""Writes the page of the documentation that shows the table of uses.

`PYTHONPATH=tests python -m uses.page` writes it anew.
"""

import pathlib

from uses import USES
from uses import expected
from uses import harness

PATH = pathlib.Path(__file__).parents[2] / "docs/what_works_with_what.md"

_OPENING = """\
# What works with what

Look up whether an option of `fit` works with what you use of Keras. The table
is made from tests: `tests/test_uses.py` trains each use with Keras alone and
under the option, and compares all weights, all variables of the optimizer and
the logs.

* **=** gives the same numbers: in 64 bits, the largest difference is rounding.
  Under `mixed_precision`, which computes in 16 bits, the losses agree to a few
  percent.
* **no** raises a `ValueError` before training, which says what to use instead.
* **a number** stands for other numbers, for the reason of that number below.

The options are `microbatches=3`, `gradient_accumulation_steps=2` (with batches
half as large), `mixed_precision="bfloat16"`, `remat="auto"`, `dtr=True`,
`memory_budget="8GB"`, `sharding="full"` in one process, `chunked_loss=True` (of
which each use has a cross-entropy) and `chunked_attention=True`.

"""


def text() -> str:
    """The page."""
    options = [name for name in harness.OPTIONS if name != "none"]
    notes: list[str] = []
    heads = [f"`{name}`" for name in options]
    rows = [["use", *heads], ["---", *[":-:" for _ in heads]]]
    for use in USES:
        cells = [_cell(use, option, notes) for option in options]
        rows.append([use.replace("_", " "), *cells])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    reasons = [
        f"{number}. {reason[0].upper()}{reason[1:]}."
        for number, reason in enumerate(notes, 1)
    ]
    closing = (
        "\n\nSee [what differs](accumulation.md#what-differs) and "
        "[mixed precision](mixed_precision.md).\n"
    )
    return _OPENING + table + "\n\n" + "\n".join(reasons) + closing


def _cell(use: str, option: str, notes: list[str]) -> str:
    if (use, option) in expected.REFUSED:
        return "no"
    reason = expected.DIFFERS.get((use, option))
    if reason is None:
        return "="
    if reason not in notes:
        notes.append(reason)
    return str(notes.index(reason) + 1)


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
