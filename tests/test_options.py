"""Every option of product.md is parsed here, and bad ones are refused."""

import dataclasses

import numpy as np
import pytest

import kmem
from kmem.options import split_options


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ({"memory_budget": "8GB"}, 8 * 10**9),
        ({"memory_budget": 8}, 8),
        ({"memory_budget": 0.5}, 0.5),
        ({"memory_budget": 1.0}, 1.0),
        ({"microbatches": 4}, kmem.MicroBatches(4)),
        ({"microbatches": np.int32(4)}, kmem.MicroBatches(4)),
        ({"microbatches": kmem.MicroBatches(4)}, kmem.MicroBatches(4)),
        ({"gradient_accumulation_steps": 2}, kmem.GradientAccumulation(2)),
        ({"mixed_precision": "float16"}, kmem.MixedPrecision("float16")),
        ({"remat": "auto"}, kmem.Remat()),
        ({"remat": "2GB"}, kmem.Remat(budget=2 * 10**9)),
        ({"remat": 0.3}, kmem.Remat(budget=0.3)),
        ({"remat": "plan.json"}, kmem.Remat(plan="plan.json")),
        ({"dtr": True}, kmem.DTR()),
        ({"dtr": "5GB"}, kmem.DTR(eviction_threshold=5 * 10**9)),
        ({"sharding": "full"}, kmem.Sharding("full")),
        ({"chunked_loss": True}, True),
        ({"chunked_attention": False}, None),
    ],
)
def test_short_forms_become_option_classes(given, parsed):
    (name,) = given

    assert getattr(kmem.MemoryOptions(**given), name) == parsed


BAD = {
    "microbatches": [0, -1, 1.5, "4", True, float("nan"), [4]],
    "gradient_accumulation_steps": [0, -1, 2.0, "2", False],
    "mixed_precision": ["float32", "fp16", 16, True],
    "memory_budget": ["5 GBs", -1, 0, 1.5, 0.0, float("nan"), True],
    "remat": ["5 GBs", -1, 0, 2.5, float("nan"), True, "plan.pkl"],
    "dtr": ["5 GBs", -1, 0.5, "0GB"],
    "sharding": ["zero", 3, True],
    "chunked_loss": ["yes", 2, 0.5],
    "chunked_attention": ["yes", 2, 0.5],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD.items() for value in values],
)
def test_bad_values_are_refused_with_their_value(name, value):
    with pytest.raises(ValueError, match="Received: ") as error:
        kmem.MemoryOptions(**{name: value})

    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: kmem.MixedPrecision("float16", initial_scale=0),
        lambda: kmem.MixedPrecision("float16", initial_scale=1e300),
        lambda: kmem.MixedPrecision("float16", initial_scale=1e-300),
        lambda: kmem.MixedPrecision("float16", initial_scale=10**400),
        lambda: kmem.callbacks.MixedPrecision("float16", initial_scale=1e39),
        lambda: kmem.MixedPrecision("float16", initial_scale=float("nan")),
        lambda: kmem.MixedPrecision("float16", dynamic_growth_steps=0),
        lambda: kmem.MixedPrecision("float16", exclude="dense"),
        lambda: kmem.MixedPrecision("float16", exclude=5),
        lambda: kmem.Remat(solver="best"),
        lambda: kmem.Remat(budget=0.5, plan="plan.json"),
        lambda: kmem.DTR(heuristic="fifo"),
        lambda: kmem.DTR(evictee_minimum_size=-1),
        lambda: kmem.Sharding(gather_dtype="int8"),
        lambda: kmem.Sharding(accumulate="remote"),
        lambda: kmem.Sharding(units="block"),
        lambda: kmem.Sharding(units=5),
        lambda: kmem.MemoryOptions(memory_budget=1, allow=5),
        lambda: kmem.Genetic(thresh_nr_try=0),
        lambda: kmem.Genetic(genetic_nr_iter=-1),
    ],
)
def test_bad_fields_are_refused_when_the_option_is_made(make):
    with pytest.raises(ValueError, match="Received: "):
        make()


@pytest.mark.parametrize("name", ["dtr", "chunked_loss", "chunked_attention"])
def test_an_option_that_is_false_is_off(name):
    assert not kmem.MemoryOptions(**{name: False})


def test_remat_and_dtr_exclude_each_other():
    with pytest.raises(ValueError, match="exclude each other"):
        kmem.MemoryOptions(remat="auto", dtr=True)


def test_an_unknown_option_suggests_the_nearest_name():
    with pytest.raises(TypeError, match="Did you mean `microbatches`?"):
        split_options({"micro_batches": 4}, {"epochs"})


def test_options_are_taken_out_of_the_arguments_of_a_call():
    arguments = {"epochs": 2, "microbatches": 4}

    options = split_options(arguments, {"epochs"})

    assert arguments == {"epochs": 2}
    assert options == kmem.MemoryOptions(microbatches=4)


def test_options_are_true_if_one_is_on():
    assert not kmem.MemoryOptions()
    assert kmem.MemoryOptions(microbatches=1)


@pytest.mark.parametrize(
    "option", [kmem.MicroBatches(4), kmem.Remat(), kmem.MemoryOptions()]
)
def test_options_do_not_change_once_made(option):
    (field, *_) = dataclasses.fields(option)

    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(option, field.name, 1)


@pytest.mark.parametrize("value", [2**31, 10**30, True, 1.0, float("inf")])
@pytest.mark.parametrize(
    "name", ["microbatches", "gradient_accumulation_steps"]
)
def test_a_count_is_one_that_tensorflow_can_hold(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be a positive int"):
        kmem.MemoryOptions(**{name: value})
    assert getattr(kmem.MemoryOptions(**{name: np.int64(4)}), name)
