"""Chooses how a step is taken, by steps that leave no trace."""
