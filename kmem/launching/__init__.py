"""Starts the processes of a distributed run, and ends them.

`cluster` tells whether a cluster has started them already, `network` gives
them one of their own, `ranks` starts and watches them. `guardian.py` and
`rank.py` are the first code of new processes, which run these files
themselves. Nothing here imports TensorFlow.
"""
