"""Parallel mask tokens (P-EAGLE, PARD, DFlash and their kin): all rows of a block in one pass."""
