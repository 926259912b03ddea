"""Corrections inside a block: what tokens that were chosen earlier in a draft change in the logits
of later ones.

A parallel head predicts all K tokens of a draft independently. A correction makes the logits of
draft token i depend on the tokens chosen before it, at a small part of the cost of another pass:

    state of a path -> corrected logits of its next token, and the state after them

Every kind works on paths: W of them per row, one for a chain, the nodes of one depth for a tree. So
the probabilities of a draft are those of the sequential draw, exactly.

Legend: B rows, W paths, M rows of a block, K draft tokens, H width of the head, V target
vocabulary, Vd ids that the head can propose, r rank, S width of a state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.arguments import check_choice, check_integer
from specdec.drafters.head.config import check_fields

Embed = Callable[[Tensor], Tensor]
"""Token ids `[B, W]` -> embeddings `[B, W, H]` of the head or its target."""


@dataclass(frozen=True)
class HeadSizes:
    """What a correction has to know of its head: H, V, Vd, its rows: M (`None` without a block) and
    which of them predicts the first draft token, and the `eps` of its norms.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    block_size: int | None
    first_row: int
    rms_norm_eps: float = 1e-6


class DraftBlock(NamedTuple):
    """A pass over a block, before any of its tokens is chosen.

    Args:
        logits: `[B, S, Vd]`, of the S rows that predict a token.
        hidden: `[B, S, H]`, from which these logits are, after the final norm.
        feature: `[B, H]`, the target's last features, as the layers get them as a key.
        embed: of the head.
    """

    logits: Tensor
    hidden: Tensor
    feature: Tensor
    embed: Embed


class DraftRow(NamedTuple):
    """What the logits of one draft token are corrected by.

    Args:
        index: of the draft token, 0..K - 1.
        logits: `[B, 1, Vd]` (or `[B, W, Vd]`), of the parallel pass.
        hidden: `[B, 1, H]` (or `[B, W, H]`), from which these logits are, after the final norm.
        tokens: `[B, W]` int64, the last token of each path: for draft token 0 the last committed
            one.
        state: `[B, W, S]`, of each path, before `tokens` were chosen.
        embed: of the head.
        block: what `Correction.read` made of the whole block.
    """

    index: int
    logits: Tensor
    hidden: Tensor
    tokens: Tensor
    state: Tensor
    embed: Embed
    block: Any = None


class Correction(nn.Module, ABC):
    """The weights of one kind."""

    state_width = 0
    """S."""
    reads_block = False
    """`read` is called before the first token, with all rows of the block, whatever K is."""

    def read(self, block: DraftBlock) -> Any:
        """What the tokens of all paths share."""

    def begin(self, block: Tensor, known: Tensor) -> Tensor:
        """The state of a path without tokens, `[B, 1, S]`.

        Args:
            block: `[B, M, H]`, what the rows of the pass put out, after the final norm.
            known: `[B, 2]` int64, the last two committed tokens.
        """
        return block.new_zeros(len(block), 1, self.state_width)

    @abstractmethod
    def forward(self, at: DraftRow) -> tuple[Tensor, Tensor]:
        """Corrected logits `[B, W, Vd]` of a draft token, and the states `[B, W, S]` after them."""


class CorrectionConfig(ABC):
    """The sizes of one kind, a frozen dataclass; integers are at least 1, or their default."""

    def __post_init__(self):
        check_fields(self)
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, int):
                check_integer(f"{type(self).__name__}.{part.name}", value, min(part.default, 1))

    @abstractmethod
    def build(self, sizes: HeadSizes) -> Correction:
        """New weights."""


@dataclass(frozen=True)
class MarkovConfig(CorrectionConfig):
    """DSpark's: logits + `W2 z`, where `z` comes from `W1[previous token]`.

    Args:
        rank: r.
        kind: `"vanilla"`: z is the embedding. `"gated"`: it is multiplied by a gate of the row's
            state and the embedding. `"rnn"`: z is put out by a recurrent cell over the path.

    Example:
        >>> markov = MarkovConfig(rank=2).build(HeadSizes(4, 9, 9, None, -1))
        >>> markov.markov_w1.weight.shape, markov.markov_w2.weight.shape
        (torch.Size([9, 2]), torch.Size([9, 2]))

    Reference: DeepSeek-AI, DeepSpec (DSpark), `deepspec/modeling/dspark/markov_head.py`.
    """

    rank: int = 256
    kind: Literal["vanilla", "gated", "rnn"] = "vanilla"

    def __post_init__(self):
        super().__post_init__()
        check_choice("MarkovConfig.kind", self.kind, ("vanilla", "gated", "rnn"))

    def build(self, sizes: HeadSizes) -> Correction:
        """New weights."""
        return {"vanilla": Markov, "gated": GatedMarkov, "rnn": RecurrentMarkov}[self.kind](
            self, sizes
        )


class Markov(Correction):
    """Logits depend on the token before."""

    def __init__(self, config: MarkovConfig, sizes: HeadSizes):
        super().__init__()
        self.markov_w1 = nn.Embedding(sizes.vocab_size, config.rank)
        self.markov_w2 = nn.Linear(config.rank, sizes.draft_vocab_size, bias=False)

    def forward(self, at: DraftRow) -> tuple[Tensor, Tensor]:
        """See `Correction`."""
        latent, state = self.latent(at.hidden, self.markov_w1(at.tokens), at.state)
        return _added(at.logits, latent, self.markov_w2), state

    def latent(self, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """z `[B, W, r]`, of the embeddings of the tokens before, and the states after."""
        return previous, state


class GatedMarkov(Markov):
    """A gate says how much of the token before counts."""

    def __init__(self, config: MarkovConfig, sizes: HeadSizes):
        super().__init__(config, sizes)
        self.gate_proj = nn.Linear(sizes.hidden_size + config.rank, config.rank)

    def latent(self, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `Markov`."""
        hidden = hidden.expand(*previous.shape[:-1], -1)
        gate = self.gate_proj(torch.cat([hidden, previous], dim=-1)).sigmoid()
        return gate * previous, state


class RecurrentMarkov(Markov):
    """A cell of r units reads the path."""

    def __init__(self, config: MarkovConfig, sizes: HeadSizes):
        super().__init__(config, sizes)
        self.first_row, self.state_width = sizes.first_row, config.rank
        self.joint_proj = nn.Linear(2 * config.rank + sizes.hidden_size, 3 * config.rank)

    def begin(self, block: Tensor, known: Tensor) -> Tensor:
        """Zeros, or what follows the rows that predict no draft token: speculators trains the cell
        over all rows of a block, the last committed token before its own row as well.
        """
        state = super().begin(block, known)
        for row in range(self.first_row):
            last = self.markov_w1(known[:, 1:])
            state = self.latent(block[:, row : row + 1], last, state)[1]
        return state

    def latent(self, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `Markov`."""
        hidden = hidden.expand(*previous.shape[:-1], -1)
        joined = self.joint_proj(torch.cat([state, previous, hidden], dim=-1))
        gate, candidate, out = joined.chunk(3, dim=-1)
        gate = gate.sigmoid()
        return out.tanh(), gate * state + (1 - gate) * candidate.tanh()


@dataclass(frozen=True)
class DominoConfig(CorrectionConfig):
    """Domino's: a GRU reads the embeddings of the path, last committed token included; a small MLP
    of its state and the row's adds to the logits.

    Args:
        rank: inner width of the MLP (`emb_dim`).
        gru_width: of the GRU's state (`gru_hidden_dim`).
        first: draft tokens before this one keep their logits (`pure_draft_prefix_len`).

    Reference: SpecForge 0.2.0, `specforge/modeling/draft/domino.py`.
    """

    rank: int = 256
    gru_width: int = 1024
    first: int = 0

    def build(self, sizes: HeadSizes) -> Correction:
        """New weights."""
        return Domino(self, sizes)


class Domino(Correction):
    """See `DominoConfig`."""

    def __init__(self, config: DominoConfig, sizes: HeadSizes):
        super().__init__()
        self.first, self.state_width = config.first, config.gru_width
        width, inner = sizes.hidden_size, config.gru_width
        self.prefix_gru = nn.GRU(width, inner, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + inner, config.rank, bias=False),
            nn.SiLU(),
            nn.Linear(config.rank, sizes.draft_vocab_size, bias=False),
        )

    def forward(self, at: DraftRow) -> tuple[Tensor, Tensor]:
        """See `Correction`."""
        read, gru = at.embed(at.tokens).to(at.state.dtype), self.prefix_gru
        weights = gru.weight_ih_l0, gru.weight_hh_l0
        # A cell by itself: cuDNN's GRU wants its weights in one piece of memory.
        state = torch.gru_cell(read.flatten(0, -2), at.state.flatten(0, -2), *weights)
        state = state.view(*read.shape[:-1], -1)
        if at.index < self.first:
            return at.logits.expand(*at.tokens.shape, -1), state
        inner, act, last = self.embed_proj
        joined = torch.cat([at.hidden.expand(*at.tokens.shape, -1), state], dim=-1)
        return _added(at.logits, act(inner(joined)), last), state


@dataclass(frozen=True)
class SelectorConfig(CorrectionConfig):
    """DFlash 2's: the best tokens of the parallel logits are scored against the token before, and
    nothing else is drafted.

    Args:
        rank: r.
        top_k: how many tokens.

    Reference: Z Lab, DFlash 2; speculators 0.9.0, `models/dflash2/model_definitions.py`.
    """

    rank: int = 256
    top_k: int = 16

    def build(self, sizes: HeadSizes) -> Correction:
        """New weights; `ValueError` for a head of fewer ids than the target's vocabulary."""
        check_candidates("a selector", self.top_k, sizes)
        return Selector(self, sizes)


class Selector(Correction):
    """See `SelectorConfig`: score = logit + sum over r of pred[before] (W h) succ[token]."""

    def __init__(self, config: SelectorConfig, sizes: HeadSizes):
        super().__init__()
        self.top_k = config.top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(sizes.vocab_size, config.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(sizes.vocab_size, config.rank))
        self.hidden_projection = nn.Linear(sizes.hidden_size, config.rank, bias=False)

    def forward(self, at: DraftRow) -> tuple[Tensor, Tensor]:
        """See `Correction`; `-inf` outside the candidates."""
        best, ids = at.logits.topk(self.top_k, dim=-1)  # [B, 1, k]
        before = F.embedding(at.tokens, self.predecessor_codebook)  # [B, W, r]
        query = before * self.hidden_projection(at.hidden).to(before.dtype)
        after = F.embedding(ids, self.successor_codebook)  # [B, 1, k, r]
        scores = best + (query[..., None, :] * after).sum(dim=-1).to(best.dtype)  # [B, W, k]
        return among(ids, scores, at), at.state


@dataclass(frozen=True)
class XPressConfig(CorrectionConfig):
    """XPress's: each row's input is made of its state, the mean of the block's, and the token
    before; a causal mixer over the block and a gated MLP follow, and a readout to the vocabulary.

    Args:
        rank: r, the width of it all.
        mlp_ratio: inner width of the MLP, as a multiple of r.

    Reference: speculators 0.9.0, `models/xpress/model_definitions.py`. Engines iterate the block in
    parallel; here each row is made once, after the token before it, which is their fixed point.
    """

    rank: int = 256
    mlp_ratio: int = 2

    def build(self, sizes: HeadSizes) -> Correction:
        """New weights; `ValueError` for a head without a block."""
        if sizes.block_size is None:
            raise ValueError("XPress mixes the rows of a block, and the head has no block_size")
        return XPress(self, sizes)


class XPress(Correction):
    """See `XPressConfig`. A state is the mean's projection, then the inputs of all M rows, zeros
    for those to come.
    """

    def __init__(self, config: XPressConfig, sizes: HeadSizes):
        super().__init__()
        self.rank, self.first_row = config.rank, sizes.first_row
        rank, inner, width = config.rank, config.rank * config.mlp_ratio, sizes.hidden_size
        self.state_width = rank * sizes.block_size  # of the rows, besides the mean
        self.token_embed = nn.Embedding(sizes.vocab_size, rank)
        self.down_h = nn.Linear(width, rank, bias=False)
        self.down_g = nn.Linear(width, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, sizes.block_size, sizes.block_size))
        self.mlp_gate = nn.Linear(rank, inner, bias=False)
        self.mlp_up = nn.Linear(rank, inner, bias=False)
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.readout = nn.Linear(rank, sizes.draft_vocab_size, bias=False)

    def begin(self, block: Tensor, known: Tensor) -> Tensor:
        """With the rows before the first that predicts a draft token: in the layout of DFlash the
        last committed token's own, which follows the token before it.
        """
        mean = self.down_g(block.mean(dim=1, keepdim=True))
        state = torch.cat([mean, super().begin(block, known)], dim=-1)
        for row in range(self.first_row):
            state = self._read(row, block[:, row : row + 1], known[:, :1], state)
        return state

    def forward(self, at: DraftRow) -> tuple[Tensor, Tensor]:
        """See `Correction`."""
        row = self.first_row + at.index
        state = self._read(row, at.hidden, at.tokens, at.state)
        inputs = state.unflatten(-1, (-1, self.rank))[..., 1:, :]  # [B, W, M, r]
        mixed = inputs[..., row, :] + torch.einsum(
            "rm,...mr->...r", self.mix_l[:, row, : row + 1], inputs[..., : row + 1, :]
        )
        inner = F.silu(self.mlp_gate(mixed)) * self.mlp_up(mixed)
        return _added(at.logits, mixed + self.mlp_down(inner), self.readout), state

    def _read(self, row: int, hidden: Tensor, tokens: Tensor, state: Tensor) -> Tensor:
        """States with the input of one more row."""
        before = self.token_embed(tokens)  # [B, W, r]
        own = self.down_h(hidden).expand_as(before)
        own = self.in_proj(torch.cat([own, state[..., : self.rank], before], dim=-1))
        start = (1 + row) * self.rank
        return torch.cat([state[..., :start], own, state[..., start + self.rank :]], dim=-1)


def _added(logits: Tensor, latent: Tensor, linear: nn.Linear) -> Tensor:
    """Logits `[B, 1, Vd]` or `[B, W, Vd]` plus `linear(latent)` of `[B, W, r]`, in one product: a
    pass over the vocabulary less.
    """
    logits = logits.expand(*latent.shape[:-1], -1).flatten(0, -2).to(latent.dtype)
    out = torch.addmm(logits, latent.flatten(0, -2), linear.weight.t())
    return out.view(*latent.shape[:-1], -1)


def check_candidates(what: str, top_k: int, sizes: HeadSizes) -> None:
    """Raises `ValueError` where so many candidates of the whole vocabulary are not to be had."""
    if sizes.draft_vocab_size != sizes.vocab_size or top_k > sizes.vocab_size:
        raise ValueError(
            f"{what} of {top_k} candidates needs the target's whole vocabulary of "
            f"{sizes.vocab_size} ids, and at least so many; the head has {sizes.draft_vocab_size}"
        )


def among(ids: Tensor, scores: Tensor, at: DraftRow) -> Tensor:
    """Logits `[B, W, Vd]` that are scores `[B, W, k]` of candidates `[B, 1, k]`, else `-inf`."""
    out = scores.new_full((*at.tokens.shape, at.logits.shape[-1]), -torch.inf)
    return out.scatter(-1, ids.expand_as(scores), scores)
