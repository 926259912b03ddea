"""The self-test: whether an HF model over slots is the function that its own code computes."""
