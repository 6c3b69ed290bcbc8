"""DTR: gives up tensors when memory runs short, and recomputes them when they
are read (Kirisame et al., ICLR 2021). The rules are in custom_ops/dtr/."""
