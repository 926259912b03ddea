"""The bar that shows how far a certificate is."""

from functools import partial

from tqdm import tqdm

BAR = partial(tqdm, leave=False, disable=None, delay=5.0)
"""Wraps a list: a bar on terminals only, after some seconds."""
