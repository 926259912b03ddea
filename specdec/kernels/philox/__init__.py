"""Philox: random bits as a function of counter and key, without state. See README.md."""

from specdec.kernels.philox.reference import philox, step_uniforms, to_uniforms

__all__ = ["philox", "step_uniforms", "to_uniforms"]
