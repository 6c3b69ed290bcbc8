"""Cross-entropy without the logits of all tokens at once."""

from kmem.losses.linear import LinearCrossEntropy as LinearCrossEntropy

__all__ = ["LinearCrossEntropy"]
