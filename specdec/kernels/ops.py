"""The operations as the rest of the library calls them: on a GPU a Triton kernel, elsewhere the
definition.

Legend: B rows, K draft tokens, N places of a window, V vocabulary.
"""

from torch import Tensor

from specdec.kernels import gate as gates
from specdec.kernels import reference
from specdec.kernels.gate import Floor, Gate, Truncation

Decision = tuple[Tensor, Tensor, Tensor]
"""tokens `[B, K + 1]`, num_accepted `[B]`, faults `[B]`."""


def find_floor(logits: Tensor, temperature: Tensor | None, truncation: Truncation) -> Floor:
    """The floor that top-k, top-p and min-p come down to; see `gate.find_floor`."""
    return gates.find_floor(logits, temperature, truncation)


def sample(logits: Tensor, gate: Gate, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draws from logits through the gate.

    Args:
        logits: `[B, V]` or `[B, N, V]`.
        gate: from logits to laws.
        uniforms: `[B]` or `[B, N]` float64 in [0, 1).

    Returns:
        Tokens of the shape of `uniforms` and the laws that they were drawn from, of the shape of
        `logits`.
    """
    law = gates.law(logits, gate)
    return reference.draw(law, uniforms), law


def race(logits: Tensor, gate: Gate, key: Tensor, position: Tensor, stream: int) -> Tensor:
    """Draws from logits `[B, N, V]` through the gate by an exponential race; see
    `reference.race`.
    """
    return reference.race(gates.law(logits, gate), key, position, stream)


def verify_tokens(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    num_valid: Tensor | None,
    logits: Tensor,
    gate: Gate,
    accept_uniforms: Tensor,
    resample_uniforms: Tensor,
) -> Decision:
    """`reference.verify_chain` on the target's logits `[B, K + 1, V]`, and what is wrong with the
    inputs.
    """
    law = gates.law(logits, gate)
    draft = draft_tokens, draft_probs, num_valid
    tokens, count = reference.verify_chain(*draft, law, accept_uniforms, resample_uniforms)
    return tokens, count, reference.find_faults(*draft, logits.amax(dim=-1), count)


def verify_blocks(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    num_valid: Tensor | None,
    logits: Tensor,
    gate: Gate,
    accept_uniforms: Tensor,
    resample_uniforms: Tensor,
) -> Decision:
    """`reference.verify_block` on the target's logits `[B, K + 1, V]`, and what is wrong with the
    inputs.
    """
    law = gates.law(logits, gate)
    draft = draft_tokens, draft_probs, num_valid
    tokens, count = reference.verify_block(*draft, law, accept_uniforms, resample_uniforms)
    return tokens, count, reference.find_faults(*draft, logits.amax(dim=-1), count)
