"""Randomness as an argument: counter-based numbers that depend on a row's own seed and position
only.

Philox turns a counter and a key into 128 random bits without any state. Here the key is the row's
seed and the counter is (position of the step's root, index within the step, stream, 0).
Consequences:

- A row's numbers do not depend on its neighbours, the batch order, the padding or the device.
- Streams (propose, accept, resample) are different counters, so no number is ever used for two
  purposes.
- Every step starts at a new position, so no number is ever used in two steps. (Keying by the
  position of each *token* would reuse the noise of rejected tokens in the next step; a sampler
  whose decision at one position looks at later ones would then be biased.)

The one exception is the race, in which drafter and target are to draw alike: its numbers belong to
the position of the token, and are used by nothing else. There are as many races at a position as a
rule asks for, by number (`path`), each with numbers of its own.

A rule that needs other numbers asks for them by a name of its own: `noise.uniform("mine", 5)` are
uniforms whose counters are (position of the step's root, index, a hash of the name, 1).

How the tokens of a draft are drawn by these numbers (`DrawRule`) belongs to the sampler, since the
two must fit. Most samplers need independent draws and their probabilities. In coupled sampling
drafter and target draw by a race with the same noise.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from specdec.arguments import check_integer, check_tensor
from specdec.kernels.philox.reference import named_uniforms, step_uniforms

if TYPE_CHECKING:
    from specdec.samplers.logits_filter import LogitsFilter
    from specdec.samplers.races import Races
    from specdec.samplers.scripted import ScriptedNoise

MAX_SEED = 2**64 - 1


class Stream(IntEnum):
    """What a number is for; part of the counter, so that streams are disjoint.

    A step of K draft tokens has W = K + 1 numbers of each stream (`[B, W]` float64 in [0, 1)).

    Example:
        >>> noise = Noise([7]).at(torch.tensor([3]), width=5)  # K = 4
        >>> noise.uniform(Stream.ACCEPT).shape, noise.uniform(Stream.RESAMPLE)[:, 0].shape
        (torch.Size([1, 5]), torch.Size([1]))
    """

    PROPOSE = 0
    """For the drafter: number i draws draft token i, 0 <= i < K; number K is not used."""
    ACCEPT = 1
    """For the sampler: number i decides on draft token i; number K is not used."""
    RESAMPLE = 2
    """For the sampler: number 0 draws the recovered or bonus token; the others are not used."""


class StepNoise:
    """The numbers of one step, made when they are first asked for.

    Args:
        key: `[B, 2]` words of the rows' seeds.
        start: `[B]` position of the root.
        width: W, numbers per stream: K + 1 in a step of K draft tokens.

    Example:
        >>> from specdec.samplers import LogitsFilter
        >>> noise = Noise([7, 8]).at(torch.tensor([3, 6]), width=5)
        >>> noise.race(torch.zeros(2, 4, 10), LogitsFilter(2), index=0).shape
        torch.Size([2, 4])
    """

    def __init__(self, key: Tensor, start: Tensor, width: int):
        self._key, self._start, self._width = key, start, width
        self.path: Tensor | int = 0
        self._depths: Tensor | int | None = None
        self._origin: StepNoise | None = None

    def at_depths(self, depths: Tensor | int, path: Tensor | int = 0) -> Self:
        """The same numbers, for tokens of a tree: races belong to positions, and a token at depth d
        is raced for at position d + 1 after the root, whatever its index.

        Args:
            depths: of the tokens that the logits of a race follow, 0 for the root: int64 `[B,
                N]`, or a number for all.
            path: of independent `Paths`, which of them each token is on, int64 `[N]`: what a
                `DrawRule` finds in `noise.path`. 0 where there is no more than one.
        """
        other = copy.copy(self)
        other._depths, other._origin, other.path = depths, self, path
        return other

    def uniform(self, stream: Stream | str, num: int | None = None) -> Tensor:
        """`[B, W]` float64 uniforms in [0, 1) of one stream, or `[B, num]` of a name of your own.

        Args:
            stream: what they are for; a name that the library does not use has numbers of its own,
                the same ones whenever this step asks for them.
            num: of a name's numbers, W where it is left out. The first are the same for every
                number. A `Stream` has W.

        Example:
            >>> noise = Noise([7]).at(torch.tensor([3]), width=5)
            >>> coins = noise.uniform("coins", 2)
            >>> coins.shape, coins.equal(noise.uniform("coins", 8)[:, :2])
            (torch.Size([1, 2]), True)
        """
        if isinstance(stream, str):
            num = self._width if num is None else num
            return named_uniforms(self._key, self._start, zlib.crc32(stream.encode()), num)
        if num is not None:
            raise ValueError(f"{Stream(stream)!r} has {self._width} numbers; leave num out")
        return self._uniforms[Stream(stream)]

    @cached_property
    def _uniforms(self) -> tuple[Tensor, ...]:
        if self._origin is not None:  # made once for all depths of a tree
            return self._origin._uniforms
        return step_uniforms(self._key, self._start, len(Stream), self._width).unbind(dim=1)

    def race(
        self,
        logits: Tensor,
        logits_filter: LogitsFilter,
        index: int,
        *,
        path: Tensor | int = 0,
    ) -> Tensor:
        """The winners of exponential races between tokens.

        Args:
            logits: `[B, N, V]`.
            logits_filter: from logits to the distributions that the winners have.
            index: of the first of the N tokens in the step; 0 is the one after the root.
            path: which of the races at its position each token is drawn by: a number >= 0, or int64
                `[N]`. Races of other numbers are independent.

        Returns:
            `[B, N]` tokens.
        """
        return self._races().race(logits, logits_filter, index, path)

    def arrivals(self, logits: Tensor, index: int, *, path: Tensor | int = 0) -> Tensor:
        """The numbers of `race`, for rules that make winners of several races: `[B, N, V]` float64
        Exp(1) draws, of which the least `arrival / probability` wins (`kernels.first_arrival`).

        Args:
            logits, index, path: as of `race`; of the logits the shape and the device count.
        """
        return self._races().arrivals(logits, index, path)

    def exponentials(self, vocab_size: int) -> Tensor:
        """`[B, V]` float64 Exp(1) draws, for rules that draw the extra token by a race of their
        own; used by nothing else.
        """
        return self._races().exponentials(vocab_size)

    def _races(self) -> Races:
        from specdec.samplers.races import Races  # no other rule draws by them

        return Races(self._key, self._start, self._depths)


@dataclass(init=False, eq=False, repr=False)
class Noise:
    """Per-row source of numbers; holds seeds, no state.

    Args:
        seeds: one integer in 0..2**64 - 1 per row.
        device: where numbers are made; the bits are the same everywhere.

    Example:
        >>> noise = Noise([7, 7])
        >>> step = noise.at(torch.tensor([3, 3]), width=5)
        >>> u = step.uniform(Stream.ACCEPT)
        >>> u.shape, bool((u[0] == u[1]).all())
        (torch.Size([2, 5]), True)
    """

    _key: Tensor  # [B, 2]

    def __init__(self, seeds: list[int], *, device: torch.device | str = "cpu"):
        for row, seed in enumerate(seeds):
            if not 0 <= check_integer(f"seed of row {row}", seed) <= MAX_SEED:
                raise ValueError(
                    f"seed of row {row} is {seed}; expected an integer in 0..2**64 - 1"
                )
        words = [[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds]
        self._key = torch.tensor(words, device=device)

    def at(self, start: Tensor, width: int) -> StepNoise:
        """The numbers of the step whose root is at position `start`.

        Args:
            start: `[B]` int64.
            width: numbers per stream, K + 1 for a chain.
        """
        check_tensor("start", start, (len(self._key),), (torch.long,))
        return StepNoise(self._key, start, width)


DrawRule = Callable[..., tuple[Tensor, Tensor | None]]
"""(logits `[B, n, V]`, logits filter, noise, index, wants_probs, out) -> tokens `[B, n]`,
probabilities. The index is that of the first token, or node of a tree, in the draft; `noise.path`
says which of independent paths each is on.
"""


EditDraftLogits = Callable[[Tensor], Tensor]
"""(a drafter's logits `[B, n, V]` over the target's vocabulary, V) -> logits of the same shape."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """What a drafter has to know of a step, beside its context, to draw tokens.

    Args:
        num_draft_tokens: K of this step.
        logits_filter: how the target's logits become probabilities; drafts are filtered alike.
        noise: the step's numbers.
        rule: `draw_by_inversion` or `draw_by_race`.
        wants_probs: the sampler can use the probabilities of the tokens.
        wants_raw: a trace asks for `Draft.raw_probs`.
        is_shared: other drafters draft for the same rows, so new tokens of a context may be
            accepted tokens of another drafter.
        edit: changes a drafter's logits before they are drawn, in this step; set by a drafter that
            wraps another one (`with_edit`). `Proposal.edit` does so in every step.

    Example:
        >>> from specdec import LogitsFilter, Proposal
        >>> noise = Noise([7]).at(torch.tensor([3]), width=3)
        >>> drawing = Drawing(2, LogitsFilter(1), noise, draw_by_inversion)
        >>> drafting = Proposal().begin(drawing)
        >>> tokens = [drafting.draw(torch.zeros(1, 1, 9)) for _ in range(drawing.num_draft_tokens)]
        >>> drafting.end().probs.shape
        torch.Size([1, 2, 9])
    """

    num_draft_tokens: int
    logits_filter: LogitsFilter
    noise: StepNoise | ScriptedNoise
    rule: DrawRule
    wants_probs: bool = True
    wants_raw: bool = False
    is_shared: bool = False
    edit: EditDraftLogits | None = None

    def with_edit(self, edit: EditDraftLogits) -> Drawing:
        """The same with one more edit, which runs before those that are asked for already: of
        drafters around each other the innermost one's is first.

        Args:
            edit: of a drafter that wraps another one.
        """
        outer = self.edit
        return replace(self, edit=edit if outer is None else lambda logits: outer(edit(logits)))


def draw_by_inversion(
    logits: Tensor,
    logits_filter: LogitsFilter,
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
        logits_filter: from logits to the distribution that the token is drawn from.
        noise: the step's numbers; the stream `PROPOSE` is used.
        index: of the first of the draft tokens, 0..K - n.
        wants_probs: whether the probabilities are asked for.
        out: a table that is filled with them; see `kernels.sample`.

    Returns:
        Tokens `[B, n]`, and probabilities `[B, n, V]` or `None` for a point mass.
    """
    uniforms = (
        None
        if logits_filter.is_greedy
        else noise.uniform(Stream.PROPOSE).narrow(1, index, logits.shape[1])
    )
    if wants_probs:
        return logits_filter.draw(logits, uniforms, out)
    return logits_filter.choose(logits, uniforms), None
