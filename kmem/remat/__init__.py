"""Rematerialization: a backward pass that runs its forward pass again.

`recompute(fn)` gives a function with the same results that keeps its
arguments only, after Chen et al., "Training Deep Nets with Sublinear Memory
Cost" (2016). Unlike `tf.recompute_grad` and `keras.remat` it gives the same
numbers as `fn` itself: what `fn` draws, assigns, adds to the losses or masks
happens once, and is seen alike by both runs. What it does not do: choose what
to wrap, which is planning.
"""

from kmem.remat.gradient import is_repeating as is_repeating
from kmem.remat.gradient import is_running as is_running
from kmem.remat.gradient import is_watched as is_watched
from kmem.remat.gradient import recompute as recompute
from kmem.remat.gradient import why_not_recomputable as why_not_recomputable
from kmem.remat.purity import NotRecomputable as NotRecomputable
