"""Write slots: keys and values of a window into a cache, in one launch. See README.md."""

from specdec.kernels.write_slots.reference import write_slots

__all__ = ["write_slots"]
