"""What a model is like, found by running it again."""
