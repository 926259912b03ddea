"""`UnoDrafter`: the target drafts a block in one forward, with an adapter on the block's noise.

Legend: B rows, K draft tokens, N tokens of a window, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.arguments import check_integer
from specdec.drafters import files
from specdec.drafters.proposal import Kind
from specdec.drafters.self_draft import SelfDrafter
from specdec.drafters.tree import Tree, TreePlan
from specdec.drafters.tree_drafter import TreeDrafter
from specdec.graphs.tree import shared
from specdec.samplers.noise import Drawing
from specdec.targets.edits.edit import window_of
from specdec.targets.target import Target
from specdec.targets.view import wrap_forward
from specdec.types import Context, Draft

_FIRST = "noise_from"
"""Row input of the draft's forward, `[B]`: the first slot of noise."""


@dataclass(frozen=True, eq=False)
class UnoState:
    """How trees grow; `None` for chains. Nothing is remembered of a text."""

    plan: TreePlan | None = shared(default=None)


class UnoDrafter(TreeDrafter, SelfDrafter):
    """Drafts with the target itself and a low-rank adapter: one forward over the last token and K -
    1 tokens of noise behind it drafts all K tokens.

    The last token is read by the target's own weights, so the first draft token is the target's.
    Tokens of noise are read by adapted weights, see the last token and the noise before them, and
    predict what follows their positions; independently of each other, so that `Draft.probs` are
    their marginals. What the forward writes lies where the target's step writes. The target that
    verifies has no adapter.

    The noise is uniform over ids from 1 to below `mask_token_id`, made of the position and the
    row's last token: one text has one noise, in every batch, and a seed changes nothing of it.

    Args:
        target: that it drafts for: the model, or the generator's `Target`; without adapters.
        adapter: a folder or a Hugging Face id of a LoRA adapter that PEFT has saved.
        num_draft_tokens: K.
        mask_token_id: with which the adapter was trained; no file says it. 151669 for
            `s-sahoo/uno-qwen3-8B`. `None` is V, as for K2-Horizon's.
        tree: of the most likely tokens of each position, `Tree(nodes=60, depth=16, top_k=32)` or
            "60x16"; `None` drafts chains.
        revision: of the adapter, on the hub.
        proposal, draft_temperature: as for `SelfDrafter`.

    Raises:
        TypeError, ValueError: as `SelfDrafter`; an adapter that is no plain LoRA or of another
            model; a target with adapters of PEFT's.

    Example:
        >>> from specdec import SpeculativeGenerator
        >>> def uno(model, folder):  # python -m pip install huggingface_hub; snapshot_download
        ...     drafter = UnoDrafter(model, folder, 8, mask_token_id=151669)
        ...     return SpeculativeGenerator(model, drafter)

    Reference: Sahoo et al., arXiv:2609.04010.
    """

    def __init__(
        self,
        target: Target | PreTrainedModel,
        adapter: str | Path,
        num_draft_tokens: int = 8,
        *,
        mask_token_id: int | None = None,
        tree: Tree | str | None = None,
        revision: str | None = None,
        proposal: Kind = "sample",
        draft_temperature: float | None = None,
    ):
        options = {"proposal": proposal, "draft_temperature": draft_temperature}
        SelfDrafter.__init__(self, target, num_draft_tokens, **options)
        own = self._target
        limit = own.vocab_size
        if mask_token_id is None:
            mask_token_id = limit
        self.mask_token_id = check_integer("mask_token_id", mask_token_id, 2, limit)
        pairs = files.checkpoints("adapter").read_adapter(adapter, own.model, revision=revision)
        self._layers = tuple(pairs)
        for name, index in (("down", 0), ("up", 1)):
            weights = (nn.Parameter(pair[index], requires_grad=False) for pair in pairs.values())
            setattr(self, name, nn.ParameterList(weights))
        self._runs = Target(own.model, edits=(*own.edits, self._adapt))
        self._try()
        self.tree = tree

    @torch.inference_mode()
    def _try(self) -> None:
        """A forward of two tokens, the second of which is noise; `ValueError` where it fails."""
        rows = torch.zeros(3, dtype=torch.long, device=self._runs.device)
        cache = self._runs.init_cache(3, 2)
        cache.row_inputs = {_FIRST: rows + 1}
        self._runs.verify(cache, rows, rows, Draft(rows[:, None]))

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> UnoState:
        """There is nothing to remember of a text."""
        return UnoState(self.tree and TreePlan(self.tree, device, is_read=False))

    def propose(self, context: Context, state: UnoState, drawing: Drawing) -> Draft:
        """One forward of the target; see the class."""
        self.check_target(context.target.target)
        count, text = drawing.num_draft_tokens, context.target
        root = context.tokens.gather(1, context.num_new.clamp(min=0)[:, None])  # [B, 1]
        length = min(self.tree_depth or count, count)
        noise = noise_ids(root, text.positions, length - 1, self.mask_token_id)
        inputs = text.cache.row_inputs if text.row_inputs is None else text.row_inputs
        text = replace(text, row_inputs={**inputs, _FIRST: text.lengths + 1})
        logits, _ = text.forward(self._runs, torch.cat([root, noise], dim=1))  # [B, N, V]
        if state.plan is None:
            drafting = self.proposal.begin(drawing)
            drafting.draw(logits)
            return drafting.end()

        def expand(nodes):
            return logits[:, nodes.depth : nodes.depth + 1]

        return state.plan.grow(self.proposal, drawing, logits[:, :1], expand)

    def _adapt(self, view: PreTrainedModel) -> None:
        """An edit: adds the adapter's products to those of noise."""
        modules = dict(view.named_modules())
        for index, name in enumerate(self._layers):
            around = partial(self._product, view, name, self.down[index], self.up[index])
            wrap_forward(modules[name], around)

    def _product(
        self,
        view: PreTrainedModel,
        name: str,
        down: Tensor,
        up: Tensor,
        forward: Callable[[Tensor], Tensor],
        x: Tensor,
    ) -> Tensor:
        out, window = forward(x), window_of(view).on(x.device)
        if _FIRST not in window.row_inputs:  # the model is tried
            return out
        is_noise = window.slots >= window.row_inputs[_FIRST][:, None]  # [B, N]
        if x.shape[:-1] != is_noise.shape:
            raise ValueError(
                f"UnoDrafter needs layers that read each row by itself, and {name} gets "
                f"{list(x.shape)} for a window of {list(is_noise.shape)}"
            )
        added = (x.to(down.dtype) @ down.mT @ up.mT).to(out.dtype)
        return out + added.where(is_noise[..., None], 0)


def noise_ids(root: Tensor, positions: Tensor, count: int, limit: int) -> Tensor:
    """Ids from 1 to `limit` - 1, a hash of what stands before them and where.

    Args:
        root: `[B, 1]` int64, the last token of each row.
        positions: `[B]`, where it stands.
        count: of ids.
        limit: above all of them.

    Returns:
        `[B, count]` int64.

    Example:
        >>> noise_ids(torch.tensor([[5]]), torch.tensor([9]), 3, 100)
        tensor([[69, 43, 38]])
    """
    index = torch.arange(1, count + 1, device=root.device)
    bits = (root * 0x1E3779B185EBCA8 + (positions[:, None] + index) * 0x11B54A32D192ED) & _BITS
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
        bits = ((bits ^ (bits >> shift)) * factor) & _BITS
    return 1 + (bits ^ (bits >> 31)) % (limit - 1)


_BITS = (1 << 62) - 1
