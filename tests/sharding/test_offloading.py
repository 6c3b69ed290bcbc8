"""State is kept in the machine's own memory where another device computes."""

import functools

import offloaded
import pytest

import kmem


def run(*functions):
    main = functools.partial(offloaded.main, *functions)
    (results,) = kmem.distributed.launch(main, 1)
    return results


def numbers(devices):
    return {device[-5:] for device in devices}


def test_shards_are_updated_where_they_are_and_their_steps_undone():
    placed, undone = run(offloaded.placed, offloaded.undone)

    updates, kept, after, error = placed
    assert numbers([*updates, *kept]) == {"CPU:0"}
    assert numbers(after) == {"CPU:1"}
    assert error < 1e-12
    num_events, same, after = undone
    assert num_events == 6
    assert same
    # Also when an error has ended the training.
    assert numbers(after) == {"CPU:1"}


@pytest.mark.exhaustive
def test_it_is_among_the_ways_to_keep_a_budget():
    ((tried, error),) = run(offloaded.chosen)

    assert offloaded.OFFLOAD in tried
    assert None in tried
    assert error < 1e-11


@pytest.mark.exhaustive
def test_a_larger_batch_is_chosen_for_while_weights_are_in_shards():
    ((rows, error),) = run(offloaded.grown)

    assert rows == 36
    assert error < 1e-11
