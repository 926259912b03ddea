"""Learned heads: their weights and wiring, and what heads of every family share.

A family's head is imported from its own module, `specdec.heads.eagle` for instance.
"""
