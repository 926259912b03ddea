"""Traces: every step of a generation with its probabilities, draws, entropies and times."""

from specdec.lab.trace.record import Trace

__all__ = ["Trace"]
