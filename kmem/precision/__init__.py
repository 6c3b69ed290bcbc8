"""Computes in 16 bits while a step's Python runs, with float32 variables.

`policies` gives the layers of a model mixed policies for a while, `guards`
keeps ids exact and names the layers whose own code is in the way, and
`loss_scale` keeps small float16 gradients from becoming zero.
"""

from kmem.precision.guards import warn as warn
from kmem.precision.loss_scale import around as around
from kmem.precision.loss_scale import loss_scaled as loss_scaled
from kmem.precision.loss_scale import none_remembered as none_remembered
from kmem.precision.loss_scale import recall_scale as recall_scale
from kmem.precision.loss_scale import remember_scale as remember_scale
from kmem.precision.loss_scale import scale_of as scale_of
from kmem.precision.loss_scale import scales_loss as scales_loss
from kmem.precision.loss_scale import set_scale as set_scale
from kmem.precision.policies import applied as applied
