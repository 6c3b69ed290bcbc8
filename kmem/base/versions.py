"""The TensorFlow and Keras that kmem was tested with, checked at import."""

import importlib.metadata
import re

__version__ = importlib.metadata.version("kmem")

_TENSORFLOW = ((2, 20), (2, 21))
_KERAS = (3, 12)


def check() -> None:
    """Raises an `ImportError` that says what to install, or to set."""
    import keras
    import tensorflow as tf

    if not _TENSORFLOW[0] <= _numbers(tf.__version__) <= _TENSORFLOW[1]:
        raise ImportError(
            "kmem needs TensorFlow 2.20 or 2.21: "
            'pip install "tensorflow>=2.20,<2.22". '
            f"Received: TensorFlow {tf.__version__}"
        )
    if _numbers(keras.__version__) < _KERAS:
        raise ImportError(
            'kmem needs Keras 3.12 or later: pip install "keras>=3.12". '
            f"Received: Keras {keras.__version__}"
        )
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            "kmem needs Keras on TensorFlow: set the environment variable "
            "KERAS_BACKEND=tensorflow before Keras is imported. "
            f"Received: KERAS_BACKEND={keras.backend.backend()}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
