"""What fine-tuning a language model needs, as options are added one by one.

    python benchmarks/fine_tuning.py --output benchmarks/fine_tuning.md

KerasHub's GPT-2 with random weights: 8 layers of 512 features, 16,384 words.
Steps of Adam through `fit` over 4 rows of 512 tokens, each case in a process
of its own. What is held is there before a step: weights and the optimizer's
variables. The peak is that of a step, with what is held.
"""

import argparse
import json
import sys

import table
from measured_steps import meter

WORDS, TOKENS, ROWS = 16384, 512, 4
CHUNKS = {"chunked_loss": True, "chunked_attention": True}
BFLOAT16 = {"mixed_precision": "bfloat16"}
# The mode of `quantize`, whether there is LoRA, and options of `fit`.
CASES = {
    "all weights": (None, False, {}),
    "LoRA of rank 8": (None, True, {}),
    "LoRA on int8": ("int8", True, {}),
    "LoRA on int8, bfloat16": ("int8", True, BFLOAT16),
    "LoRA on int8, bfloat16, chunks": ("int8", True, BFLOAT16 | CHUNKS),
    "LoRA on int8, bfloat16, chunks, 4 micro-batches": (
        *("int8", True),
        BFLOAT16 | CHUNKS | {"microbatches": 4},
    ),
    "LoRA on int4, bfloat16, chunks": ("int4", True, BFLOAT16 | CHUNKS),
    "LoRA on int8, bfloat16, chunks, remat": (
        *("int8", True),
        BFLOAT16 | CHUNKS | {"remat": "auto"},
    ),
}
STEPS = 4


def gpt2(*sizes, tokens, dropout, optimizer, lora, mode=None):
    """A model that trains; of a quantized one the embeddings stay as they are.

    Args:
        sizes: Words, layers, heads, features, and those within a block.
        optimizer: Makes one of a learning rate.
        lora: Whether there is LoRA, of rank 8.
        mode: That of `quantize`, if any.
    """
    import keras
    import keras_hub

    import kmem

    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(
        *sizes, dropout=dropout, max_sequence_length=tokens
    )
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    if mode:
        products = keras.layers.Dense, keras.layers.EinsumDense
        model.quantize(mode, filters=lambda x: isinstance(x, products))
    if lora:
        backbone.enable_lora(8)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(1e-4), loss)
    return kmem.wrap(model)


def steps_of(model, words, rows, tokens, epochs, **options):
    """Trains on a batch of random words; what was met."""
    import numpy as np

    ids = np.random.default_rng(0).integers(0, words, (rows, tokens))
    x = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    step = meter()
    model.fit(
        *(x, ids),
        batch_size=rows,
        epochs=epochs,
        verbose=0,
        callbacks=[step],
        **options,
    )
    return step


def measure(name):
    """Prints the trained weights, and bytes."""
    import keras

    mode, lora, options = CASES[name]
    model = gpt2(
        *(WORDS, 8, 8, 512, 2048),
        tokens=TOKENS,
        dropout=0.0,
        optimizer=keras.optimizers.Adam,
        lora=lora,
        mode=mode,
    )
    step = steps_of(model, WORDS, ROWS, TOKENS, STEPS, **options)
    trained = sum(v.numpy().size for v in model.trainable_variables)
    held, peak = step.held_bytes[-1], max(step.peak_bytes[1:])
    print(json.dumps([trained, held, peak]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="cases that end so")
    table.add_output(parser)
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments.one)
        return
    packages = "kmem", "tensorflow", "keras", "keras-hub"
    header = (
        "# Fine-tuning a language model\n\n"
        f"{table.made_by(__file__, packages)}\n\n"
        "| case | weights that are trained | held | peak of a step |\n"
        "| --- | ---: | ---: | ---: |\n"
    )
    write = table.writer(arguments.output, header)
    for name in [each for each in CASES if each.endswith(arguments.only)]:
        *_, line = table.lines_of(__file__, "--one", name)
        trained, held, peak = json.loads(line)
        write(
            f"| {name} | {trained / 1e6:.2f} M | {held / 1e6:.0f} MB | "
            f"{peak / 1e6:.0f} MB |\n"
        )


if __name__ == "__main__":
    sys.exit(main())
