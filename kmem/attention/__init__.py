"""Attention without the scores of all queries at once."""
