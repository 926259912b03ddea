"""The step that joins target, drafter and sampler, and the two sides of a call: tensors on the
device (`state`) and what the host keeps of it (`generation`, `collector`).
"""
