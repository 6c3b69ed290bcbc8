"""The least memory in which GPT-2 small trains, with and without each part.

    python benchmarks/gpt2_small.py --output benchmarks/gpt2_small.md

KerasHub's GPT-2 of 124 M random weights, one example of 1,024 tokens, dropout
of 0.1: steps through `fit`, each case in a process of its own. Each case is
trained without a plan, and then with the smallest budget for `remat` that
kmem names. What is held is there before a step: weights, and the optimizer's
variables. A peak is the most in memory during a step, with what is held; times
are the fastest of some steps.
"""

import argparse
import json
import sys

import table
from fine_tuning import gpt2
from fine_tuning import steps_of

WORDS, TOKENS = 50257, 1024
HALF = {"mixed_precision": "bfloat16"}
LOSS, ATTENTION = {"chunked_loss": True}, {"chunked_attention": True}
ALL = HALF | LOSS | ATTENTION
# The optimizer, whether there is LoRA, and options of `fit`.
CASES = {
    "AdamW": ("AdamW", False, {}),
    "AdamW, bfloat16": ("AdamW", False, HALF),
    "all parts": ("AdamW8bit", False, ALL),
    "all but the loss in chunks": ("AdamW8bit", False, HALF | ATTENTION),
    "all but the attention in chunks": ("AdamW8bit", False, HALF | LOSS),
    "all but 8 bits in the optimizer": ("AdamW", False, ALL),
    "all parts, and LoRA of rank 8": ("AdamW8bit", True, ALL),
}
STEPS = 3


def measure(name):
    """Prints what is held, and peaks and times without and with a plan."""
    import keras

    import kmem

    optimizer, lora, options = CASES[name]
    kinds = {"AdamW": keras.optimizers.AdamW}
    model = gpt2(
        *(WORDS, 12, 12, 768, 3072),
        tokens=TOKENS,
        dropout=0.1,
        optimizer=kinds.get(optimizer, kmem.optimizers.AdamW8bit),
        lora=lora,
    )

    def steps(**more):
        step = steps_of(model, WORDS, 1, TOKENS, STEPS, **options, **more)
        # The first one traces.
        peak = max(step.peak_bytes[1:])
        return step.held_bytes[-1], peak, min(step.seconds[1:])

    held, *plain = steps()
    try:
        steps(remat="1KB")
    except ValueError as error:
        least = error.smallest_bytes
    print(json.dumps([held, *plain, least, *steps(remat=least)[1:]]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="cases that begin so")
    table.add_output(parser)
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments.one)
        return
    packages = "kmem", "tensorflow", "keras", "keras-hub"
    header = (
        "# The least memory for GPT-2 small\n\n"
        f"{table.made_by(__file__, packages)}\n\n"
        "One example of 1,024 tokens; in MB. Least: the smallest budget for "
        "`remat` that kmem names, and the peak of steps within it, whose time "
        "is relative to those of the case without a plan.\n\n"
        "| case | held | peak | step, s | least | peak within | time |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    )
    write = table.writer(arguments.output, header)
    for name in [each for each in CASES if each.startswith(arguments.only)]:
        *_, line = table.lines_of(__file__, "--one", name)
        held, peak, seconds, least, within, slower = json.loads(line)
        sizes = [f"{size / 1e6:.0f}" for size in (held, peak, least, within)]
        write(
            f"| {name} | {sizes[0]} | {sizes[1]} | {seconds:.1f} | "
            f"{sizes[2]} | {sizes[3]} | {slower / seconds:.2f} |\n"
        )


if __name__ == "__main__":
    sys.exit(main())
