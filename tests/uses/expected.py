"""What is not simply equal to Keras alone, and why.

A cell of the table is (use, option). What is in neither dictionary is equal,
to rounding; under `mixed_precision`, within what 16 bits can tell.
"""

_PARTS = ("microbatches", "gradient_accumulation_steps")

# The words with which an option refuses a use, before anything is trained.
REFUSED: dict[tuple[str, str], str] = {
    ("spectral_normalization", "sharding"): (
        "cannot train one that assigns them in its `call`"
    ),
    ("stateful_rnn", "microbatches"): (
        "cannot be used with layers that keep a state for each example"
    ),
    ("jit_compile", "dtr"): "call `model.compile(jit_compile=False)`",
    ("jit_compile", "sharding"): "call `model.compile(jit_compile=False)`",
    ("train_step_with_two_optimizers", "microbatches"): "second update",
    ("train_step_with_two_optimizers", "gradient_accumulation_steps"): (
        "second update"
    ),
    ("train_step_with_two_optimizers", "sharding"): "second update",
    **{
        ("train_step_that_clips", option): "a norm of a part is not that of"
        for option in _PARTS
    },
    **{
        ("train_step_that_averages_weights", option): (
            "must not read weights after its update"
        )
        for option in (*_PARTS, "sharding")
    },
    ("stateful_rnn", "memory_budget"): (
        "cannot be used with layers that keep a state for each example"
    ),
    ("stateful_rnn", "sharding"): (
        "cannot be used with layers that keep a state for each example"
    ),
    **{
        (f"optimizer_{name}", "sharding"): "updates every number by itself"
        for name in ("lamb", "adafactor", "muon", "schedule_free")
    },
    **{
        (use, "chunked_loss"): "needs a Functional or Sequential model"
        for use in (
            "subclassed",
            "train_step_with_the_compiled_loss",
            "train_step_without_a_compiled_loss",
            "train_step_with_two_optimizers",
            "train_step_that_clips",
            "train_step_that_averages_weights",
            "train_step_that_calls_two_models",
            "own_compute_loss",
        )
    },
    **{
        (use, "chunked_loss"): "needs a model with one output"
        for use in (
            "list_of_outputs",
            "tuple_of_outputs",
            "dict_of_outputs",
            "output_without_a_loss",
        )
    },
    **{
        (use, "chunked_loss"): "Leave `chunked_loss` out"
        for use in (
            "loss_as_a_function",
            "loss_that_compares_examples",
            "ctc_loss",
        )
    },
    ("optimizer_that_accumulates", "gradient_accumulation_steps"): (
        "by kmem or by the optimizer, not by both"
    ),
}

# Why the numbers are others; docs/accumulation.md says so as well.
DIFFERS: dict[tuple[str, str], str] = {
    **{
        ("loss_that_compares_examples", option): (
            "it compares the examples of a micro-batch"
        )
        for option in _PARTS
    },
    **{
        ("batch_normalization", option): (
            "each micro-batch is normalized by its own statistics"
        )
        for option in _PARTS
    },
    **{
        ("dropout", option): "random layers draw anew for every micro-batch"
        for option in _PARTS
    },
    ("dropout", "mixed_precision"): "random numbers of 16 bits are others",
    **{
        ("embedding_with_adam", option): (
            "the gradients of an id that occurs several times are added up "
            "before the optimizer squares them"
        )
        for option in (*_PARTS, "sharding")
    },
    ("spectral_normalization", "gradient_accumulation_steps"): (
        "its vector changes with each of the loader's batches, as in Keras"
    ),
    ("stateful_rnn", "gradient_accumulation_steps"): (
        "it keeps a state for each example of the loader's batches"
    ),
}
