import threading

import keras
import pytest

from kmem.base import patching


class Greeter:
    def greet(self):
        return "hello"


def test_what_was_missing_is_missing_again():
    greeter = Greeter()

    with patching.attribute(greeter, "name", "x"):
        assert greeter.name == "x"

    assert vars(greeter) == {}


def test_an_attribute_comes_back_however_blocks_overlap():
    greeter = Greeter()
    greeter.name = "before"
    first = patching.attribute(greeter, "name", "first")
    second = patching.attribute(greeter, "name", "second")

    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert greeter.name == "second"
    second.__exit__(None, None, None)

    assert greeter.name == "before"


def test_replacements_of_a_method_are_nested():
    greeter = Greeter()

    def louder(greet):
        return greet() + "!"

    with patching.method(greeter, "greet", louder):
        with patching.method(greeter, "greet", louder):
            assert greeter.greet() == "hello!!"
        assert greeter.greet() == "hello!"

    assert vars(greeter) == {}


def test_a_method_comes_back_after_an_error():
    greeter = Greeter()

    with pytest.raises(ZeroDivisionError):
        with patching.method(greeter, "greet", lambda greet: 1 / 0):
            greeter.greet()

    assert vars(greeter) == {}
    assert greeter.greet() == "hello"


def test_threads_that_take_turns_call_their_own_replacements():
    greeter = Greeter()
    turns = threading.Barrier(2)
    heard = {}

    def run(name):
        replacement = patching.method(
            greeter, "greet", lambda greet: f"{greet()} {name}"
        )
        with replacement:
            turns.wait()  # Both are within.
            heard[name] = greeter.greet()
            turns.wait()

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    turns_of_others = greeter.greet()
    for thread in threads:
        thread.join()

    assert heard == {"a": "hello a", "b": "hello b"}
    assert turns_of_others == "hello"
    assert vars(greeter) == {}


def test_a_member_that_a_property_sets_is_given_back():
    variable = keras.Variable([1.0])
    plain, other = keras.regularizers.L2(0.1), keras.regularizers.L1(0.1)
    variable.regularizer = plain

    with patching.member(variable, "regularizer", other):
        assert variable.regularizer is other
    assert variable.regularizer is plain
