"""Functions that take off, by themselves, what put them on a model.

A callback is not told when another one raises, or when training is interrupted
between two steps. What this module does not do: notice that before the model
trains again.
"""

from collections.abc import Callable


def guarded(session, name: str, function: Callable) -> Callable:
    """A function that takes its session off by itself.

    It does when it raises, or is called in a later `fit`.

    Args:
        session: What put the function on its `model`.
        name: The model's attribute.
        function: Takes an iterator.
    """
    model = session.model
    history = model.history

    def call(iterator):
        # Every `fit` has a history of its own.
        if model.history is not history:
            session.remove()
            getattr(model, f"make_{name}")()
            return getattr(model, name)(iterator)
        try:
            return function(iterator)
        except StopIteration:
            raise
        except BaseException:
            session.remove(failed=True)
            raise

    return call
