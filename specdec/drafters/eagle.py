"""`EagleDrafter`: a small head reads the target's features and drafts a chain behind them.

Legend: B rows, N tokens of a pass, K draft tokens, H width of the head, V target vocabulary, Vd ids
that the head can propose, D width of an attention head, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specdec.drafters.base import Drafter, check_num_draft_tokens
from specdec.drafters.checkpoints import Layout, ReadingOptions, read_checkpoint, save_head
from specdec.drafters.eagle_head import EagleHead
from specdec.drafters.eagle_target import HoldsModel, borrow, check_vocabulary, model_of
from specdec.drafters.layers import SlotPasses
from specdec.drafters.proposal import Kind, Proposal
from specdec.drafters.rotary import rotary_table
from specdec.samplers.drawing import Drawing
from specdec.target.cache import KeyValueShape, SlotCache
from specdec.types import Context, Draft


@dataclass(frozen=True, eq=False)
class EagleState:
    """The head's keys and values, row t of a text in slot t.

    Args:
        cache: of S slots.
        angles: `[S + 1, 2 D]`, see `rotary_table`.
    """

    cache: SlotCache
    angles: Tensor

    def keep(self, rows: list[int]) -> EagleState:
        """The given rows, in the storage of all."""
        return replace(self, cache=self.cache.keep(rows))

    def reset(self) -> None:
        """Empties the slots."""
        self.cache.reset()


class EagleDrafter(Drafter):
    """Drafts K tokens one after the other with an EAGLE head, a chain.

    A step costs K passes of the head. The first reads the newly committed tokens beside the
    target's own features, over whatever was guessed in their place, and predicts the first draft
    token from the last of them; each other pass reads one drafted token beside the head's output of
    the pass before. A row of which the target has read nothing yet (the first step of a one-token
    prompt) proposes nothing, since there is no feature to draft from.

    Where the head has no embeddings or no vocabulary head of its own it uses the target's, by
    reference: they are no parameters of the drafter. Of the embeddings it reads the plain table, as
    the trainers of public heads do, also where the target multiplies them by a constant (Gemma).
    EAGLE-3 normalises embeddings, so there it makes no difference. Of the vocabulary head it uses
    the module; what the target's model does to its logits afterwards (a scale in Cohere, a soft cap
    in Gemma 2) is left out, and `EagleConfig.logit_scale` can make up for a scale.

    Args:
        head: the weights, in eval mode, on the target's device. Its data type may be another.
        target: the HF model, or `Target`, that the head was made for.
        num_draft_tokens: K.
        proposal: `"sample"` draws draft tokens and tells their laws; `"argmax"` proposes the most
            likely tokens, point masses.
        draft_temperature: of the draft law where the target samples; `None` is the target's own.

    Raises:
        ValueError: the head does not fit the target (vocabulary, widths), K < 0, or see `Proposal`.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> from specdec.drafters import EagleConfig, EagleHead
        >>> target = zoo.load_target()
        >>> vocab = target.config.vocab_size
        >>> config = EagleConfig("attention", 128, 256, 1, 4, 4, 32, vocab, vocab, (2, 8, 13), 128)
        >>> drafter = EagleDrafter(EagleHead(config), target, num_draft_tokens=3)
        >>> SpeculativeGenerator(target, drafter).target.feature_layers
        (2, 8, 13)

    Reference: Li et al., arXiv:2401.15077 (EAGLE), arXiv:2406.16858 (EAGLE-2, here as a chain),
    arXiv:2503.01840 (EAGLE-3).
    """

    def __init__(
        self,
        head: EagleHead,
        target: PreTrainedModel | HoldsModel,
        num_draft_tokens: int = 4,
        *,
        proposal: Kind = "sample",
        draft_temperature: float | None = None,
    ):
        super().__init__()
        self.num_draft_tokens = check_num_draft_tokens(num_draft_tokens)
        self.proposal = Proposal(proposal, draft_temperature)
        self.head, self.config = head, head.config
        self.feature_layers = head.config.feature_layers
        # A tuple, so that the target's modules are not registered as the drafter's own.
        self._borrowed = borrow(head.config, model_of(target))

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        target: PreTrainedModel | HoldsModel,
        num_draft_tokens: int = 4,
        *,
        proposal: Kind = "sample",
        draft_temperature: float | None = None,
        **options: Unpack[ReadingOptions],
    ) -> EagleDrafter:
        """Loads a public head: SafeAILab (yuhuili), SpecForge (lmsys), speculators (RedHatAI),
        NVIDIA or DeepSpec; `specdec inspect` shows how it is read.

        Args:
            path_or_id: a folder, or a Hugging Face id.
            target: whose device and data type the head takes.
            num_draft_tokens, proposal, draft_temperature: as for the class.
            options: of the reading (`allow_pickle`, `layer_convention`, `rope_theta`, ...), see
                `specdec.drafters.checkpoints.survey_checkpoint`.

        Raises:
            ValueError: an unsafe, damaged, unsupported or contradictory checkpoint, or one of a
                head for another target.
        """
        model = model_of(target)
        head = read_checkpoint(path_or_id, model, **options).build()
        head.to(model.get_input_embeddings().weight.device)
        kinds = {"proposal": proposal, "draft_temperature": draft_temperature}
        return cls(head, target, num_draft_tokens, **kinds)

    def save_pretrained(
        self, folder: str | Path, layout: Layout = "safeailab", *, verifier: str | None = None
    ) -> None:
        """Writes the head as vLLM and SGLang read it; Args and Raises as `save_head`."""
        shared = self._borrowed[1].weight
        k = max(self.num_draft_tokens, 1)
        options = {"lm_head": shared, "num_draft_tokens": k, "verifier": verifier}
        save_head(self.head, folder, layout, **options)

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Refuses another vocabulary or another device, naming both sides."""
        check_vocabulary(self.config, vocab_size)
        if self.head.device != device:
            raise ValueError(
                f"the head is on {self.head.device} and the target on {device}; move it with "
                f"drafter.to({str(device)!r})"
            )

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> EagleState:
        """Key/value storage for `max_length` tokens per row."""
        config, dtype = self.config, self.head.dtype
        width = config.head_dim
        shape = KeyValueShape(config.num_kv_heads, width, width, dtype, device)
        cache = SlotCache(batch_size, max_length, dict.fromkeys(range(config.num_layers), shape))
        table = rotary_table(config, cache.num_slots + 1, dtype=dtype, device=device)
        return EagleState(cache, table)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings `[B, N, H]` of tokens `[B, N]`, the head's own or the target's."""
        has_own = self.config.has_embed_tokens
        table = (self.head.embed_tokens if has_own else self._borrowed[0]).weight
        return F.embedding(tokens, table).to(self.head.dtype)

    def logits(self, out: Tensor) -> Tensor:
        """Logits `[B, N, Vd]` of the head's outputs `[B, N, H]`, through its own vocabulary head or
        the target's.
        """
        return self.head.logits(out, self._borrowed[1])

    def prefill(self, context: Context, state: EagleState) -> None:
        """Reads the new tokens beside their features."""
        self._extend(context, state, num_later=0)

    def propose(self, context: Context, state: EagleState, drawing: Drawing) -> Draft:
        """K passes of the head; a row without any new token proposes nothing."""
        num_draft_tokens = drawing.num_draft_tokens
        if num_draft_tokens == 0:
            return Draft(context.tokens[:, :0])
        passes, out = self._extend(context, state, num_later=num_draft_tokens - 1)
        num_read = out.shape[1]
        last = (context.num_new - 1).clamp(min=0)[:, None, None]
        out = out.gather(1, last.expand(-1, 1, out.shape[2]))  # [B, 1, H]
        drafting = self.proposal.begin(drawing)
        for i in range(num_draft_tokens):
            if i > 0:
                angles, attend = passes.open(num_read + i - 1, 1)
                hidden = self.head.feedback(out)
                out = self.head(self.embed(drafting.tokens[-1]), hidden, angles, attend)
            drafting.draw(self.head.over_target_ids(self.logits(out)))
        return drafting.end(context.num_new.clamp(max=1) * num_draft_tokens)

    def _extend(
        self, context: Context, state: EagleState, *, num_later: int
    ) -> tuple[SlotPasses, Tensor]:
        """Reads the new tokens beside the target's features, which replaces what was guessed there.

        Args:
            context: N new tokens.
            state: extended in place.
            num_later: how many passes of one token will follow.

        Returns:
            The passes, and the output `[B, N, H]` of the first.

        Raises:
            ValueError: the context brings no features, or features of another width.
        """
        if context.features is None:
            raise ValueError(
                f"an EAGLE head needs the target's features {self.feature_layers}, and the context "
                "brings none"
            )
        cache, count = state.cache, context.features.shape[1]
        num_new = context.num_new[:, None]
        offsets = torch.arange(max(context.tokens.shape[1], num_later), device=num_new.device)
        start = context.start[:, None]
        is_new = offsets[:count] < num_new  # [B, N]
        slots = torch.where(is_new, start + offsets[:count], cache.trash)
        if num_later:  # a row that proposes nothing leaves nothing behind either
            later = torch.where(num_new > 0, start + num_new + offsets[:num_later], cache.trash)
            slots = torch.cat([slots, later], dim=1)
        # Behind a row's end there may be anything. It goes to the trash slot, which nobody reads.
        tokens = torch.where(is_new, context.tokens[:, 1:], 0)
        hidden = self.head.fuse(context.features)
        passes = SlotPasses(cache, slots, num_attended=context.num_attended, table=state.angles)
        angles, attend = passes.open(0, count)
        return passes, self.head(self.embed(tokens), hidden, angles, attend)
