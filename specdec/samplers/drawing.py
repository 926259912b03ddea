"""How the tokens of a draft are drawn from a drafter's logits.

The rule belongs to the sampler, since the two must fit. Most samplers need independent draws and
their probabilities. In coupled sampling drafter and target draw by a race with the same noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from specdec.samplers.noise import ScriptedNoise, StepNoise, Stream
from specdec.samplers.warp import Warp

DrawRule = Callable[..., tuple[Tensor, Tensor | None]]
"""(logits `[B, n, V]`, warp, noise, index, wants_probs, out) -> tokens `[B, n]`, probabilities."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """What a drafter has to know of a step, beside its context, to draw tokens.

    Args:
        num_draft_tokens: K of this step.
        warp: how the target's logits become probabilities; drafts are warped alike.
        noise: the step's numbers.
        rule: `draw_by_inversion` or `draw_by_race`.
        wants_probs: the sampler can use the probabilities of the tokens.
    """

    num_draft_tokens: int
    warp: Warp
    noise: StepNoise | ScriptedNoise
    rule: DrawRule
    wants_probs: bool = True


def draw_by_inversion(
    logits: Tensor,
    warp: Warp,
    noise: StepNoise | ScriptedNoise,
    index: int,
    *,
    wants_probs: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Independent draws: the token at which the cumulative distribution passes a uniform.

    Args:
        logits: `[B, n, V]` of the drafter, over the target's vocabulary; one token, or several that
            are drawn independently of each other.
        warp: from logits to the distribution that the token is drawn from.
        noise: the step's numbers; the stream `PROPOSE` is used.
        index: of the first of the draft tokens, 0..K - n.
        wants_probs: whether the probabilities are asked for.
        out: a table that is filled with them; see `kernels.sample`.

    Returns:
        Tokens `[B, n]`, and probabilities `[B, n, V]` or `None` for a point mass.
    """
    uniforms = (
        None if warp.is_greedy else noise.uniform(Stream.PROPOSE).narrow(1, index, logits.shape[1])
    )
    if wants_probs:
        return warp.draw(logits, uniforms, out)
    return warp.choose(logits, uniforms), None


def draw_by_race(
    logits: Tensor,
    warp: Warp,
    noise: StepNoise | ScriptedNoise,
    index: int,
    *,
    wants_probs: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Draws by the race at the token's position; Args as `draw_by_inversion`.

    Returns no probabilities: drafter and target share this noise, so the ratio test does not apply.
    """
    if warp.is_greedy:
        return logits.argmax(dim=-1), None
    return noise.race(logits, warp, index), None
