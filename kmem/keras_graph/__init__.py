"""Reads a Keras model into a planning network, and runs it by a plan."""
