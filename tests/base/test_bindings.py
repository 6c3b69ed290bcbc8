"""What Python takes the native library for is what it is."""

import ctypes
import re

import pytest

from kmem.base import bindings
from kmem.base import building
from kmem.base import native


@pytest.fixture
def library():
    return ctypes.CDLL(native.library()._name)


def test_structs_have_the_sizes_that_the_library_has(library):
    bindings.declare(library)


@pytest.mark.parametrize("name", bindings.STRUCTS)
def test_a_struct_of_another_size_is_refused(library, monkeypatch, name):
    class Longer(bindings.STRUCTS[name]):
        _fields_ = [("another", ctypes.c_int64)]

    monkeypatch.setitem(bindings.STRUCTS, name, Longer)
    num_bytes = ctypes.sizeof(Longer)
    message = rf"{name}\(\) is {num_bytes - 8}, .*Longer has {num_bytes} bytes"
    with pytest.raises(OSError, match=message):
        bindings.declare(library)


def test_a_library_without_a_function_is_refused():
    with pytest.raises(OSError, match="it has no function kmem_"):
        bindings.declare(ctypes.CDLL(None))


def test_every_function_that_is_exported_has_a_signature():
    pattern = r"default\"\)\)\) \w+ (kmem_\w+)\(|EXPORT [\w* ]+?(kmem_\w+)\("
    exported = {
        first or second
        for source in building.sources_folder().glob("*/*.cc")
        for first, second in re.findall(pattern, source.read_text())
    }
    assert exported == set(bindings._SIGNATURES)
