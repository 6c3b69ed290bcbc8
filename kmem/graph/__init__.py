"""What kmem does to a TensorFlow graph that was traced, and nothing else."""
