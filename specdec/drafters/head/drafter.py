"""`HeadDrafter`: what drafters with a learned head have in common.

Legend: B rows, N tokens, K draft tokens, H width of the head, V target vocabulary, D width of an
attention head, S slots.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.arguments import check_placement
from specdec.drafters import files
from specdec.drafters.base import check_num_draft_tokens
from specdec.drafters.head.layers import look_up
from specdec.drafters.head.state import HeadState
from specdec.drafters.head.window import ContextRows, read_context
from specdec.drafters.proposal import Kind, Proposal
from specdec.drafters.tree_drafter import TreeDrafter
from specdec.slots.cache import SlotCache
from specdec.types import Context

if TYPE_CHECKING:
    from specdec.drafters.tree import Tree, TreePlan
    from specdec.drafters.visible import Visible
    from specdec.targets import Target


class HeadDrafter(TreeDrafter):
    """A drafter whose weights are a learned head; nearly all of them read the target's features.

    Where the head has no embeddings or no vocabulary head of its own it uses the target's, by
    reference: they are no parameters of the drafter. Of the embeddings it reads the plain table, as
    the trainers of public heads do, also where the target multiplies them by a constant (Gemma). Of
    the vocabulary head it uses the module; what the target's model does to its logits afterwards (a
    scale in Cohere, a soft cap in Gemma 2) is left out.

    Args:
        head: the weights, in eval mode, on the target's device. Its data type may be another. Of a
            head of one's own are read: `config` (a `HeadConfig`), `device`, `dtype`, `target_ids`
            (`None` where it proposes all ids) and, by `logits`, `logits(out, lm_head)` as of
            `FeatureHead`.
        target: the HF model, or `Target`, that the head was made for.
        num_draft_tokens: K; `None` is 4, or the most that the head predicts.
        proposal: `"sample"` draws draft tokens and returns their probabilities; `"argmax"` proposes
            the most likely tokens, a deterministic proposal.
        draft_temperature: of the draft where the target samples; `None` is the target's own.
        tree: drafts trees of this shape instead of chains; K is then its nodes. "32x6" is
            `Tree(nodes=32, depth=6)`.
        visible: what tokens see of the text in the head's own keys and values, in prompts too:
            `Sinks(4) + Recent(1024)`; `None` for all. A layer with a sliding window sees the last
            so many of its window.

    Raises:
        TypeError: no head, or no HF model as target.
        ValueError: the head does not fit the target (vocabulary, widths), K < 0, `visible` of a
            head without keys and values, or see `Proposal`.
    """

    head: Any  # of `head_type`; type checkers take attributes of a module for tensors
    head_type: ClassVar[type[nn.Module]] = nn.Module
    """The heads that it drafts with."""
    family: ClassVar[Any] = None
    """A `specdec.checkpoints.Family`, by which a drafter of your own reads and writes its files;
    those of the package are known there.
    """

    def __init__(
        self,
        head: nn.Module,
        target: PreTrainedModel | Target,
        num_draft_tokens: int | None = None,
        *,
        proposal: Kind = "sample",
        draft_temperature: float | None = None,
        tree: Tree | str | None = None,
        visible: Visible | None = None,
    ):
        from specdec.drafters.head.sharing import borrow, model_of

        super().__init__()
        if num_draft_tokens is None:
            most = getattr(getattr(head, "config", None), "max_draft_tokens", None)
            num_draft_tokens = min(4, most or 4)
        self.num_draft_tokens = check_num_draft_tokens(num_draft_tokens)
        self.tree = tree
        self.proposal = Proposal(proposal, draft_temperature)
        self._check_head(head)
        self.head, self.config = head, head.config
        self.feature_layers = head.config.feature_layers
        self.borrowed = borrow(head.config, model_of(target))
        self._check_draft_length()
        self.visible = visible

    def _check_visible(self, visible: Visible) -> None:
        from specdec.drafters.head.check import check_visible

        check_visible(self, visible)

    def _check_head(self, head: nn.Module) -> None:
        """Raises an error unless the module is a head of this design with weights."""
        from specdec.drafters.head.check import check_head

        check_head(type(self), head, HeadDrafter.__subclasses__())

    def _check_draft_length(self) -> None:
        limit = getattr(self.config, "max_draft_tokens", None)
        if limit is not None:
            from specdec.drafters.head.check import check_length

            check_length(
                self.tree_depth or self.num_draft_tokens, limit, is_tree=self.tree is not None
            )

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        target: PreTrainedModel | Target,
        num_draft_tokens: int | None = None,
        *,
        proposal: Kind = "sample",
        draft_temperature: float | None = None,
        tree: Tree | str | None = None,
        visible: Visible | None = None,
        **options: Any,
    ) -> Self:
        """Loads a public head; `specdec inspect` shows how it is read.

        Args:
            path_or_id: a folder, or a Hugging Face id.
            target: whose device and data type the head takes.
            num_draft_tokens, proposal, draft_temperature, tree, visible: as for the class.
            options: of the reading (`layouts`, `allow_pickle`, `layer_convention`, `rope_theta`,
                ...), see `survey_checkpoint` and the family's options.

        Raises:
            TypeError: an option that does not exist.
            ValueError: an unsafe, damaged, unsupported or contradictory checkpoint, or one of a
                head for another target.
        """
        options |= {"proposal": proposal, "draft_temperature": draft_temperature, "tree": tree}
        options |= {"visible": visible}
        family = files.checkpoints("families").family_of_drafter(cls)
        load = files.checkpoints("drafter").load
        return load(path_or_id, target, num_draft_tokens, families=(family,), **options)

    def save_pretrained(
        self,
        folder: str | Path,
        layout: Any = None,
        *,
        verifier: str | None = None,
    ) -> tuple[str, ...]:
        """Writes a head as other engines read it, one of your own by its `family`; Args, Returns
        and Raises as `checkpoints.export.save_head`. The default `verifier` is where the target was
        loaded from. Files hold weights and structure: `proposal`, `draft_temperature`, `tree`,
        `visible` and K are given to `from_pretrained` again.
        """
        return files.checkpoints("drafter").save(self, folder, layout, verifier)

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Raises ValueError for another vocabulary or device, or too many tokens for a block or
        for the ids.
        """
        self._check_draft_length()
        if self.tree is not None or self.config.vocab_size != vocab_size:
            from specdec.drafters.head.check import check_ids

            check_ids(self.config, self.tree, vocab_size)
        check_placement("the head", self.head.device, device)

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> HeadState:
        """Key/value storage for `max_length` tokens per row, and the nodes that a step reads."""
        plan, layer = self.tree_plan(device), getattr(self.config, "layer", None)
        if layer is None:
            return HeadState(None, None, plan=plan)
        room, where = plan.max_read if plan else 0, {"dtype": self.head.dtype, "device": device}
        shapes = dict.fromkeys(range(self.num_layers), layer.key_value_shape(**where))
        extra_slots = max(room, self.num_after) - self.num_draft_tokens
        cache = SlotCache(batch_size, max_length + room, shapes, extra_slots=extra_slots)
        self._show(cache)
        return HeadState(cache, layer.rotary_table(cache.num_slots + 1, **where), plan=plan)

    def tree_plan(self, device: torch.device) -> TreePlan | None:
        """How its trees grow; `None` for chains."""
        if self.tree is None:
            return None
        from specdec.drafters.tree import TreePlan

        return TreePlan(self.tree, device)

    @property
    def num_after(self) -> int:
        """Most tokens after the text that the passes of a step read or write, K or more; nodes of a
        tree are counted besides.
        """
        return self.num_draft_tokens

    @property
    def num_layers(self) -> int:
        """Decoder layers of the head that are used."""
        return self.config.num_layers

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings `[B, N, H]` of tokens `[B, N]`, the head's own or the target's."""
        head = self.head
        table = head.embed_tokens if self.config.has_embed_tokens else self.borrowed.embeddings
        return look_up(table, tokens).to(head.dtype)

    def logits(self, out: Tensor) -> Tensor:
        """Logits `[B, N, Vd]` of the head's outputs `[B, N, H]`, through its own vocabulary head or
        the target's.
        """
        return self.head.logits(out, self.borrowed.lm_head)

    def read(self, context: Context, state: HeadState) -> ContextRows:
        """The rows that the head reads of a context, see `read_context`."""
        self.check_features(context)
        return read_context(context, state.cache.padding_slot)

    def check_features(self, context: Context) -> None:
        """Raises `ValueError` if a context has no features, which the head needs."""
        if context.features is None:
            raise ValueError(
                f"the head needs the target's features {self.feature_layers}, and the context "
                "brings none"
            )
