"""Has TensorFlow not look up where in Python each operation was made.

For every operation of a graph it walks the whole stack, which is deep within a
test: a twentieth of what a run of all tests takes. Its messages alone tell of
it: where one says "defined at", leave out the call of `install`.
"""

from tensorflow.python.util import tf_stack


def install() -> None:
    """Changes TensorFlow, once."""
    here = tf_stack.extract_stack()
    tf_stack.extract_stack = lambda stacklevel=1: here
