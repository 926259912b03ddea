"""`LookaheadDrafter`: the target guesses its own continuation by Jacobi iterations.

Legend: B rows, K draft tokens (nodes of a tree), W columns of the window, N tokens of an n-gram,
L = N - 1 levels of the window, G guesses, P n-grams of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.arguments import check_integer
from specdec.drafters.base import Drafter
from specdec.drafters.lookup_tree import are_alike
from specdec.drafters.settable import OF_LOGITS
from specdec.drafters.verified import Verified
from specdec.samplers.noise import Drawing
from specdec.types import Context, Draft


@dataclass(frozen=True, eq=False)
class LookaheadState:
    """What iterations have found; ids plus 1, and 0 where nothing is known yet.

    Args:
        window: `[B, L, W]`, a trajectory of guesses, the oldest level first. Level l of column j
            guesses the token l + j after the root.
        pool: `[B, P, N]` n-grams; the place `oldest` is written next.
        oldest: `[B]`.
        root: `[B]` ids (not plus 1) of the roots of the last draft.
    """

    window: Tensor
    pool: Tensor
    oldest: Tensor
    root: Tensor


class LookaheadDrafter(Drafter):
    """Lookahead decoding: one forward of the target verifies n-grams that earlier steps have found,
    and iterates over guesses of the tokens to come, whose trajectories become the next n-grams.

    The window holds N - 1 levels of W guessed tokens, of which the first column begins with the
    root. They are nodes of the draft's tree that are never proposed (they stand beyond
    `Draft.num_valid`): each sees the text, the oldest level up to its column, and its own column.
    What the target writes after the newest level becomes its next level (a Jacobi iteration), and
    each column, read from the oldest level on, an n-gram of the pool. The window moves on by one
    token in each step. The proposal is the G latest n-grams that begin with the root, without
    it: point masses, common beginnings once.

    There are no weights, no second model and no training; a step costs what a forward over
    K + 1 = (G + W) (N - 1) tokens costs. A step with `num_draft_tokens` below K proposes from the
    pool and does not iterate.

    Args:
        window: W.
        ngram: N >= 2, tokens of an n-gram; N - 1 are proposed at once.
        guesses: G.
        pool_size: most n-grams that a row remembers; the oldest are forgotten first.

    Raises:
        TypeError: a number that is no integer.
        ValueError: a number that is too small.

    Example:
        >>> from specdec import LookaheadDrafter, SpeculativeGenerator, zoo
        >>> target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
        >>> ids = tokenizer("def main(argv):", return_tensors="pt").input_ids
        >>> generator = SpeculativeGenerator(target, LookaheadDrafter(window=5, ngram=4, guesses=5))
        >>> result = generator.generate(ids, max_new_tokens=32)
        >>> result.stats.acceptance_length > 1
        True

    Reference: Fu et al., arXiv:2402.02057, algorithm 2. The paper's settings for a model of 7
    billion weights are W = 15, N = 5, G = 15. As in the authors' program (`lade`), the window moves
    on by one token also where more were accepted.
    """

    reads_outcome = True
    _not_set = OF_LOGITS
    _set_once = ("window", "ngram", "guesses")

    def __init__(
        self, window: int = 15, ngram: int = 5, guesses: int = 15, *, pool_size: int = 8192
    ):
        super().__init__()
        self.window = check_integer("window", window, 1)
        self.ngram = check_integer("ngram", ngram, 2)
        self.guesses = check_integer("guesses", guesses, 1)
        advice = "a step adds W of them and proposes G"
        self.pool_size = check_integer("pool_size", pool_size, max(window, guesses), advice=advice)
        levels, self._num_proposed = ngram - 1, guesses * (ngram - 1)
        self.tree_depth = levels + window - 1
        # Row of the tree's window in which each guess stands; the first is the root.
        rows = self._num_proposed + torch.arange(window * levels, device="cpu")
        rows[0] = 0
        rows = rows.view(levels, window)
        above = torch.cat([rows[:1].roll(1, dims=1), rows[:-1]]).flatten()[1:] - 1
        self.register_buffer("_parents", above, persistent=False)
        self.register_buffer("_newest", rows[-1], persistent=False)

    @property
    def num_draft_tokens(self) -> int:
        """K = (G + W) (N - 1) - 1."""
        return self._num_proposed + self.window * (self.ngram - 1) - 1

    @num_draft_tokens.setter
    def num_draft_tokens(self, number: int) -> None:
        raise ValueError(
            f"LookaheadDrafter.num_draft_tokens follows from window, ngram and guesses and is "
            f"{self.num_draft_tokens}, got {number!r}; make a new LookaheadDrafter"
        )

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Fits every target: it has no weights."""
        self.to(device)

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> LookaheadState:
        """An empty window and an empty pool."""
        width, levels = self.window, self.ngram - 1
        room = max(min(self.pool_size, width * max_length), width, self.guesses)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(batch_size, *shape, dtype=torch.long, device=device)

        return LookaheadState(
            integers(levels, width), integers(room, self.ngram), integers(), integers()
        )

    def prefill(self, context: Context, state: LookaheadState) -> None:
        """The first guesses are the prompt's last tokens: that of position p is guess p modulo
        their number.
        """
        window = state.window.flatten(1)  # [B, L W]
        back = torch.arange(window.shape[1], device=window.device)
        index = context.num_new[:, None] - back  # the newest first, and each guess once
        tokens = context.tokens.gather(1, index.clamp(min=0)) + 1
        guess = (context.start[:, None] + index) % window.shape[1]
        tokens = torch.where(index >= 0, tokens, window.gather(1, guess))
        state.window.copy_(window.scatter(1, guess, tokens).view_as(state.window))

    def propose(self, context: Context, state: LookaheadState, drawing: Drawing) -> Draft:
        """The pool's n-grams after the root, and then the window."""
        root = context.tokens.gather(1, context.num_new.clamp(min=0)[:, None])  # [B, 1]
        state.root.copy_(root[:, 0])
        guesses = torch.where(state.window > 0, state.window - 1, root[..., None])
        tokens, is_found = self._found(state, root)  # [B, G, L], [B, G]
        first = are_alike(tokens).long().argmax(dim=2)  # of the n-grams that begin alike
        parents = first * tokens.shape[2] + torch.arange(tokens.shape[2], device=root.device)
        parents = F.pad(parents[..., :-1], (1, 0), value=-1).flatten(1)
        parents = torch.cat([parents, self._parents.expand(len(root), -1)], dim=1)
        nodes = torch.cat([tokens.flatten(1), guesses.flatten(1)[:, 1:]], dim=1)
        count = drawing.num_draft_tokens
        num_valid = (is_found.sum(dim=1) * tokens.shape[2]).clamp(max=count)
        depth = min(self.tree_depth, count)
        return Draft(nodes[:, :count], None, num_valid, parents[:, :count], depth)

    def _found(self, state: LookaheadState, root: Tensor) -> tuple[Tensor, Tensor]:
        """What follows the root in the n-grams that begin with it, the latest first, `[B, G, L]`,
        and which of them there are, `[B, G]`.
        """
        pool = state.pool
        age = torch.arange(pool.shape[1], device=pool.device) - state.oldest[:, None]
        is_match = pool[..., 0] == root + 1
        order = torch.where(is_match, age % pool.shape[1], -1)
        order, place = order.topk(self.guesses, dim=1)
        found = pool.gather(1, place[..., None].expand(-1, -1, pool.shape[2]))
        return (found[..., 1:] - 1).clamp(min=0), order >= 0

    def learn(self, verified: Verified, state: LookaheadState) -> None:
        """One iteration: the target's own tokens after the newest level are the next level."""
        draft, levels = verified.draft, self.ngram - 1
        if draft.tokens.shape[1] < self.num_draft_tokens:
            return
        guesses = draft.tokens[:, self._num_proposed :]
        guesses = torch.cat([state.root[:, None], guesses], dim=1).unflatten(1, (levels, -1))
        new = verified.output.logits.index_select(1, self._newest).argmax(dim=-1)  # [B, W]
        grams = torch.cat([guesses, new[:, None]], dim=1) + 1  # [B, N, W]
        state.window.copy_(grams[:, 1:])
        self._remember(state, grams.transpose(1, 2))

    def _remember(self, state: LookaheadState, grams: Tensor) -> None:
        """Writes n-grams `[B, W, N]` over the oldest of the pool. One that is there already is
        forgotten in its old place: the pool has each once.
        """
        pool, width = state.pool, grams.shape[1]
        is_alike = (grams[:, :, None] == grams[:, None]).all(dim=3)  # [B, W, W]
        is_repeated = is_alike.triu(diagonal=1).any(dim=2, keepdim=True)
        grams = grams.masked_fill(is_repeated, 0)
        is_old = (pool[:, :, None] == grams[:, None]).all(dim=3).any(dim=2, keepdim=True)
        pool.masked_fill_(is_old, 0)
        place = (state.oldest[:, None] + torch.arange(width, device=pool.device)) % pool.shape[1]
        pool.scatter_(1, place[..., None].expand_as(grams), grams)
        state.oldest.add_(width).remainder_(pool.shape[1])
