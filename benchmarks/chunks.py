"""Loss and attention in chunks beside Keras's own, in one run.

    python benchmarks/chunks.py --output benchmarks/chunks.md

Steps of SGD through `fit`, each row in a process of its own. The loss is that
of one `Dense` layer over 2,048 tokens of 64 features and 16,384 classes, then
of 4,096 tokens and 128,000 classes, which Keras's own is not given, and then of
768 features and 50,257 classes, as in GPT-2: there the weight's gradient takes
154 MB, and all logits 206 MB. The
attention is one causal `MultiHeadAttention` of 8 heads of 32 features. With
another option of `fit`, which both ways have, 8 layers come before. The peak
is what a step needs above what was held before it; times are the fastest of
several steps. Ways take turns, so that the machine is as busy for each.
"""

import argparse
import json
import sys

import table
from measured_steps import meter

CASES = {
    "loss, 2,048 tokens x 16,384": ("loss", 2048, 16384, 64),
    "loss, 4,096 tokens x 128,000": ("loss", 4096, 128000, 64),
    "loss, 1,024 tokens x 50,257": ("loss", 1024, 50257, 768),
    "attention, 2,048 tokens": ("attention", 2048, 8, 256),
    "attention, 8,192 tokens": ("attention", 8192, 8, 256),
}
WITH = {
    "remat": {"remat": "auto"},
    "dtr": {"dtr": True},
    "sharding": {"sharding": "full"},
    "memory_budget": {"memory_budget": "2GB"},
}
CASES |= {
    f"{name}, {option}": CASES[name]
    for name in ("loss, 2,048 tokens x 16,384", "attention, 2,048 tokens")
    for option in WITH
}
# What Keras's own needs more memory, or time, for than there is here.
LEFT_OUT = "loss, 4,096 tokens x 128,000", "attention, 8,192 tokens"
OPTIONS = {"loss": "chunked_loss", "attention": "chunked_attention"}
ROUNDS = 3


def build(kind, tokens, size, features, mode, depth):
    """A model, and a batch."""
    import keras
    import numpy as np

    import kmem

    keras.utils.set_random_seed(0)
    inputs = hidden = keras.Input((tokens, features))
    for _ in range(depth):
        hidden += keras.layers.Dense(features, "gelu")(hidden)
    x = np.random.default_rng(0).normal(size=(1, tokens, features))
    if kind == "loss":
        outputs = keras.layers.Dense(size)(hidden)
        y = np.arange(tokens)[None] % size
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    else:
        layer = keras.layers.MultiHeadAttention(size, features // size)
        outputs, y, loss = layer(hidden, hidden, use_causal_mask=True), x, "mse"
    model = kmem.wrap(keras.Model(inputs, outputs))
    model.compile(keras.optimizers.SGD(), loss, jit_compile=mode == "xla")
    return model, x.astype("float32"), y.astype("float32")


def added_bytes(step):
    pairs = zip(step.peak_bytes, step.held_bytes, strict=True)
    return [peak - held for peak, held in pairs]


def measure(name, mode):
    """Prints bytes, seconds and the loss of each way."""
    kind, *sizes = CASES[name]
    others = WITH.get(name.split(", ")[-1], {})
    ways = {}
    for chunked in (False, True)[name in LEFT_OUT :]:
        option = {OPTIONS[kind]: chunked} | others
        model, x, y = build(kind, *sizes, mode, 8 if others else 0)
        loss = model.fit(x, y, verbose=0, **option).history["loss"][0]
        ways[chunked] = model, x, y, option, meter(), loss
    for _ in range(ROUNDS):
        for model, x, y, option, step, _ in ways.values():
            model.fit(x, y, verbose=0, callbacks=[step], **option, epochs=3)
    results = {
        # A plan that was made anew is traced in the first step.
        str(chunked): [max(added_bytes(step)[1::3]), min(step.seconds), loss]
        for chunked, (*_, step, loss) in ways.items()
    }
    print(json.dumps(results))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="cases that begin so")
    table.add_output(parser)
    arguments = parser.parse_args()
    if arguments.one:
        measure(*arguments.one)
        return
    header = (
        "# Loss and attention in chunks\n\n" + table.made_by(__file__) + "\n\n"
        "| case | mode | peak, Keras | peak, chunks | time, chunks / Keras | "
        "loss, difference |\n| --- | --- | ---: | ---: | ---: | ---: |\n"
    )
    write = table.writer(arguments.output, header)
    for name in [each for each in CASES if each.startswith(arguments.only)]:
        is_alone = name.split(", ")[-1] not in WITH
        for mode in ("graph", "xla") if is_alone else ("graph",):
            *_, line = table.lines_of(__file__, "--one", name, mode)
            results = json.loads(line)
            peak, seconds, loss = results["True"]
            row = ["-", f"{peak / 1e6:.1f} MB", f"{seconds:.2f} s", "-"]
            if "False" in results:
                plain_peak, plain_seconds, plain_loss = results["False"]
                row[0] = f"{plain_peak / 1e6:.1f} MB"
                row[2] = f"{seconds / plain_seconds:.2f}"
                row[3] = f"{abs(loss / plain_loss - 1):.1e}"
            write(f"| {name} | {mode} | {' | '.join(row)} |\n")


if __name__ == "__main__":
    sys.exit(main())
