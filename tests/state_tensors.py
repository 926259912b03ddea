"""Where the tensors are that a state or a part of one holds."""

from specdec.graphs.owned import owned_tensors


def addresses(owner) -> dict[str, int]:
    """By path."""
    return {name: tensor.data_ptr() for name, tensor in owned_tensors(owner).items()}
