"""`UnoDrafter`: the target drafts a block in one forward, with an adapter on the block's noise.

Legend: B rows, K draft tokens, N tokens of a window, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.arguments import check_integer
from specdec.drafters.proposal import Kind
from specdec.drafters.self_draft import SelfDrafter
from specdec.drafters.tree import Tree, TreePlan
from specdec.drafters.tree_drafter import TreeDrafter
from specdec.drafters.visible import Visible
from specdec.graphs.tree import shared
from specdec.lab.show.text import one_line
from specdec.samplers.noise import Drawing, StepNoise
from specdec.targets.edits.adapters import NOISE, only_noise
from specdec.targets.target import Target
from specdec.targets.view import private_view
from specdec.types import Context, Draft


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
        adapter: a folder or a Hugging Face id of a LoRA adapter, which PEFT reads.
        num_draft_tokens: K.
        mask_token_id: with which the adapter was trained; no file says it. 151669 for
            `s-sahoo/uno-qwen3-8B`. `None` is V, as for K2-Horizon's.
        tree: of the most likely tokens of each position, `Tree(nodes=60, depth=16, top_k=32)` or
            "60x16"; `None` drafts chains.
        hub: `subfolder` and `revision` of the adapter, and others of PEFT's `from_pretrained`.
        proposal, draft_temperature: as for `SelfDrafter`.

    Raises:
        TypeError, ValueError: as `SelfDrafter`; an adapter that is no plain LoRA or of another
            model; a target with other adapters of PEFT's.
        ImportError: PEFT is not installed.

    Example:
        >>> def uno(model):
        ...     where = {"subfolder": "adapter", "mask_token_id": 151669}
        ...     return UnoDrafter(model, "s-sahoo/uno-qwen3-8B", 8, **where)

    Reference: Sahoo et al., arXiv:2609.04010.
    """

    _not_set = ("draft_temperature",)

    def __init__(
        self,
        target: Target | PreTrainedModel,
        adapter: str | Path,
        num_draft_tokens: int = 8,
        *,
        mask_token_id: int | None = None,
        tree: Tree | str | None = None,
        proposal: Kind = "sample",
        draft_temperature: float | None = None,
        **hub: Any,
    ):
        options = {"proposal": proposal, "draft_temperature": draft_temperature}
        SelfDrafter.__init__(self, target, num_draft_tokens, **options)
        own = self._target
        limit = own.vocab_size if mask_token_id is None else mask_token_id
        self.mask_token_id = check_integer("mask_token_id", limit, 2, own.vocab_size)
        adapted = _adapted(own.model, adapter, **hub)
        self._runs = Target(adapted, edits=(*own.edits, only_noise))
        self.model = self._runs.model
        self._try()
        self.tree = tree

    def _check_visible(self, visible: Visible) -> None:
        raise ValueError("UnoDrafter reads all of a text; SelfDrafter(target, visible=) a part")

    @torch.inference_mode()
    def _try(self) -> None:
        """A forward of two tokens, the second of which is noise; `ValueError` where it fails."""
        rows = torch.zeros(3, dtype=torch.long, device=self._runs.device)
        cache = self._runs.init_cache(3, 2)
        cache.row_inputs = {NOISE: rows + 1}
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
        text = replace(text, row_inputs={**inputs, NOISE: text.lengths + 1})
        logits, _ = text.forward(self._runs, torch.cat([root, noise], dim=1))  # [B, N, V]
        if state.plan is None:
            drafting = self.proposal.begin(drawing)
            drafting.draw(logits)
            return drafting.end()

        def expand(nodes):
            return logits[:, nodes.depth : nodes.depth + 1]

        return state.plan.grow(self.proposal, drawing, logits[:, :1], expand)


def _adapted(model: PreTrainedModel, adapter: str | Path, **hub: Any) -> nn.Module:
    """A `PeftModel` of a view of the model, which stays as it is."""
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise ImportError("UnoDrafter reads its adapter by PEFT: pip install peft") from error
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise ValueError("UnoDrafter needs a target without adapters; merge them into its weights")
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        config = PeftConfig.from_pretrained(adapter, **hub)
        kind, bias = config.peft_type, getattr(config, "bias", "none")
        if kind != "LORA" or bias != "none":
            raise ValueError(f"not supported: peft_type {kind}, bias {bias!r}; plain LoRA is read")
        options = {"autocast_adapter_dtype": False}
        adapted = PeftModel(private_view(model), config, **options)
        found = adapted.load_adapter(adapter, "default", **options, **hub)
    except Exception as error:  # PEFT raises errors of many kinds for files it cannot take
        raise ValueError(f"adapter {adapter}: {type(error).__name__}: {one_line(error)}") from error
    finally:
        for weight in trained:
            weight.requires_grad_(True)
    if wrong := sorted({*found.missing_keys, *found.unexpected_keys}):
        raise ValueError(
            f"adapter {adapter} lacks {len(found.missing_keys)} tensors that its configuration "
            f"names, and has {len(found.unexpected_keys)} others: {', '.join(wrong[:3])}, ..."
        )
    weights = ((n, x) for n, x in adapted.named_parameters() if ".lora_" in n)
    if broken := [name for name, weight in weights if not weight.isfinite().all()]:
        raise ValueError(f"adapter {adapter} holds NaN or infinity in {broken[0]}")
    return adapted.eval()


def noise_ids(root: Tensor, positions: Tensor, count: int, limit: int) -> Tensor:
    """Ids from 1 to `limit` - 1: numbers of what stands before them and where, of no seed.

    Args:
        root: `[B, 1]` int64, the last token of each row.
        positions: `[B]`, where it stands.
        count: of ids.
        limit: above all of them.

    Returns:
        `[B, count]` int64.

    Example:
        >>> noise_ids(torch.tensor([[5]]), torch.tensor([9]), 3, 100)
        tensor([[ 9,  5, 34]])
    """
    key = torch.cat([root, torch.zeros_like(root)], dim=1)
    uniforms = StepNoise(key, positions, count).uniform("uno")
    return 1 + (uniforms * (limit - 1)).long()
