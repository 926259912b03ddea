"""Traces: every step of a generation with its probabilities, draws, entropies and times."""

from specdec.trace.record import StepNumbers, StepTimes, Trace

__all__ = ["StepNumbers", "StepTimes", "Trace"]
