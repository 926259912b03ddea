"""The step that joins target, drafter and sampler, and the two sides of a call: tensors on the
device (`state`) and what the host keeps of it (`host`).

A loop of one's own needs `propose`, `verify`, the sampler and `commit`; the README shows it. `step`
is imported from its file, which has the same name.
"""

from specdec.loop.state import Parts, StepState
from specdec.loop.step import commit, propose, verify

__all__ = ["Parts", "StepState", "commit", "propose", "verify"]
