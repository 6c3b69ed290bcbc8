"""State is kept in the machine's own memory where another device computes."""

import offloaded
import pytest

import kmem


@pytest.fixture(scope="module")
def found():
    (results,) = kmem.distributed.launch(offloaded.main, 1)
    return results


def numbers(devices):
    return {device[-5:] for device in devices}


def test_shards_are_updated_where_they_are(found):
    updates, kept, after, error = found[0]

    assert numbers([*updates, *kept]) == {"CPU:0"}
    assert numbers(after) == {"CPU:1"}
    assert error < 1e-12


def test_it_is_among_the_ways_to_keep_a_budget(found):
    tried, error = found[1]

    assert offloaded.OFFLOAD in tried
    assert None in tried
    assert error < 1e-11


def test_a_step_of_shards_is_undone_and_taken_again(found):
    num_events, same, after = found[2]

    assert num_events == 6
    assert same
    # Also when an error has ended the training.
    assert numbers(after) == {"CPU:1"}


def test_a_larger_batch_is_chosen_for_while_weights_are_in_shards(found):
    rows, error = found[3]

    assert rows == 36
    assert error < 1e-11
