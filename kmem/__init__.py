"""kmem trains Keras models in less memory, with the same numbers.

Import it before the first TensorFlow operation: only then can it count, and
limit, every byte that TensorFlow allocates on the CPU.
"""

from kmem import versions as versions

versions.check()

from kmem import memory as memory  # noqa: E402
