"""Sample: a token from logits, by inverting the cumulative distribution. See README.md."""
