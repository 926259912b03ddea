"""Errors by what they must say: a short text that names the offending thing and the remedy."""

import contextlib

import pytest


@contextlib.contextmanager
def refused(message: str):
    """What is done ends in an error of one line with the given pieces, which `" .. "` separates."""
    with pytest.raises((TypeError, ValueError)) as caught:
        yield
    said = str(caught.value)
    assert "\n" not in said
    assert all(piece in said for piece in message.split(" .. ")), said
