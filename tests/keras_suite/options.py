"""The sets of memory options under which Keras's tests are run."""

SETS = {
    # Keras as it is: which of the tests train, and which of them pass here.
    "plain": None,
    # `kmem.wrap` alone, which must be exactly Keras.
    "none": {},
    "microbatches": {"microbatches": 2},
    "accumulation_of_one": {"gradient_accumulation_steps": 1},
    "accumulation": {"gradient_accumulation_steps": 2},
    "mixed_precision": {"mixed_precision": "bfloat16"},
    "remat": {"remat": "auto"},
    "remat_roomy": {"remat": "8GB"},
    "dtr": {"dtr": True},
    "memory_budget": {"memory_budget": "8GB"},
    "sharding": {"sharding": "full"},
    "microbatches_and_remat": {"microbatches": 2, "remat": "auto"},
}
