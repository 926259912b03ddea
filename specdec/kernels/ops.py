"""The operations as the rest of the library calls them: on a GPU a Triton kernel, on a CPU what is
fast there, elsewhere the definition. Triton is imported when a GPU first asks for it, so no other
machine needs it.

Legend: B rows, K draft tokens, N places of a window, V vocabulary.
"""

import torch
from torch import Tensor

from specdec.kernels import cpu, reference
from specdec.kernels import gate as gates
from specdec.kernels.gate import Floor, Gate, Truncation

Decision = tuple[Tensor, Tensor, Tensor]
"""tokens `[B, K + 1]`, num_accepted `[B]`, faults `[B]`."""


def find_floor(logits: Tensor, temperature: Tensor | None, truncation: Truncation) -> Floor:
    """The floor that top-k, top-p and min-p come down to; see `gate.find_floor`."""
    if _has_kernel(logits):
        from specdec.kernels import triton_floor

        return triton_floor.find_floor(logits, temperature, truncation)
    chosen = cpu if cpu.is_wide(logits) else gates
    return chosen.find_floor(logits, temperature, truncation)


def sample(
    logits: Tensor, gate: Gate, uniforms: Tensor, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draws from logits through the gate.

    Args:
        logits: `[B, V]` or `[B, N, V]`.
        gate: from logits to laws.
        uniforms: `[B]` or `[B, N]` float64 in [0, 1).
        into: a table of the shape of `logits`, float32 (float64 for float64 logits), that is filled
            with the laws, of any strides whose last is 1; `None` makes one.

    Returns:
        Tokens of the shape of `uniforms` and the laws that they were drawn from, of the shape of
        `logits`.
    """
    if _has_kernel(logits):
        from specdec.kernels import triton_sample

        return triton_sample.sample(logits, gate, uniforms, into)
    law = _law(logits, gate, into)
    return reference.draw(law, uniforms), law


def choose(logits: Tensor, gate: Gate, uniforms: Tensor) -> Tensor:
    """The tokens of `sample`, where nobody asks for their laws; on a GPU none is written."""
    if _has_kernel(logits):
        from specdec.kernels import triton_sample

        return triton_sample.choose(logits, gate, uniforms)
    return reference.draw(_law(logits, gate), uniforms)


def race(logits: Tensor, gate: Gate, key: Tensor, position: Tensor, stream: int) -> Tensor:
    """Draws from logits `[B, N, V]` through the gate by an exponential race; see
    `reference.race`.
    """
    if _has_kernel(logits):
        from specdec.kernels import triton_race

        return triton_race.race(logits, gate, key, position, stream)
    return reference.race(_law(logits, gate), key, position, stream)


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
    inputs. On a GPU `Fault.DRAFT_PROBS` is judged by the law of each row's rejected token only, the
    one that is read in full.
    """
    draft = draft_tokens, draft_probs, num_valid
    uniforms = accept_uniforms, resample_uniforms
    if _has_kernel(logits):
        from specdec.kernels import triton_verify

        return triton_verify.verify(*draft, logits, gate, *uniforms, by_block=False)
    tokens, count = reference.verify_chain(*draft, _law(logits, gate), *uniforms)
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
    draft = draft_tokens, draft_probs, num_valid
    uniforms = accept_uniforms, resample_uniforms
    if _has_kernel(logits):
        from specdec.kernels import triton_verify

        return triton_verify.verify(*draft, logits, gate, *uniforms, by_block=True)
    tokens, count = reference.verify_block(*draft, _law(logits, gate), *uniforms)
    return tokens, count, reference.find_faults(*draft, logits.amax(dim=-1), count)


def verify_draws(
    draft_tokens: Tensor, num_valid: Tensor | None, target_tokens: Tensor, largest_logits: Tensor
) -> Decision:
    """`reference.verify_points` on the target's tokens `[B, K + 1]`, and what is wrong with the
    largest of the logits, `[B, K + 1]`, that they come from.
    """
    tokens, count = reference.verify_points(draft_tokens, num_valid, target_tokens)
    faults = reference.find_faults(draft_tokens, None, num_valid, largest_logits, count)
    return tokens, count, faults


def _has_kernel(logits: Tensor) -> bool:
    """On a GPU; but float64, the precision of oracles, and gradients keep to the definition."""
    return logits.is_cuda and logits.dtype != torch.float64 and not logits.requires_grad


def _law(logits: Tensor, gate: Gate, into: Tensor | None = None) -> Tensor:
    if cpu.is_wide(logits):
        return cpu.law(logits, gate, into)
    law = gates.law(logits, gate)
    return law if into is None else into.copy_(law)
