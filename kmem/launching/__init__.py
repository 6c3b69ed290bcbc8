"""Starts the processes of a distributed run, and ends them.

`cluster` tells whether a cluster has started them already, `ranks` starts and
watches them, `addresses` gives them a network. `guardian.py` and `rank.py` are
the first code of new processes, which run these files themselves. Nothing here
imports TensorFlow.
"""
