"""Decides what to recompute, on a drawing of a graph. No TensorFlow here."""
