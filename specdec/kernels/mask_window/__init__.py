"""Mask window: the rows of one pass of a parallel drafter, from ragged contexts. See README.md."""
