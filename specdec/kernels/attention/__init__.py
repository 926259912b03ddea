"""Attention: a few queries per row over the slots that the row has filled. See README.md."""
