"""What a model trains under, from the beginning of `fit` to its end."""
