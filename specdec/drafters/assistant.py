"""`AssistantDrafter`: an assistant of Gemma 4 drafts over the keys and values of its target.

Legend: B rows, N tokens, H width of the target, h width of the assistant, V vocabulary, W slots.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from specdec.arguments import shown
from specdec.drafters.head.drafter import HeadDrafter
from specdec.drafters.head.hf_layer import HEAD_ATTENTION, HFLayerConfig
from specdec.drafters.head.layers import Attend
from specdec.drafters.head.sharing import model_of
from specdec.drafters.tree import TreePass, TreePlan
from specdec.graphs.tree import shared
from specdec.hf.layers import decoder_layers, set_implementation
from specdec.hf.lookups import ATTENTION_FIELD
from specdec.samplers.noise import Drawing
from specdec.targets import Target
from specdec.targets.attention import attend as attend_over_slots
from specdec.targets.text import TargetText
from specdec.types import Context, Draft

Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""By type of layer (`"full_attention"`, `"sliding_attention"`)."""
EMBEDDINGS, CENTROIDS = "model.embed_tokens.weight", "masked_embedding."
"""HF's name of the table that the vocabulary head is tied to, and what its names of centroids begin
with.
"""


@dataclass(frozen=True)
class AssistantConfig:
    """HF's configuration of an assistant in the words of heads (`HeadConfig`).

    Args:
        layer: of the assistant's text model.
        num_layers, vocab_size, draft_vocab_size, target_hidden_size: see `HeadConfig`.
        num_centroids: groups that the ids are sorted into; 0 for one vocabulary head over all.
        top_centroids: groups whose ids get logits of their own.
    """

    layer: HFLayerConfig
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_centroids: int = 0
    top_centroids: int = 0

    feature_layers = ("final",)
    has_embed_tokens, has_lm_head, ties_embeddings = False, True, True

    def __post_init__(self):
        count, top = self.num_centroids, self.top_centroids
        if count and (self.vocab_size % count or not 1 <= top <= count):
            raise ValueError(
                f"centroids must share out the vocabulary evenly, got num_centroids {count} (the "
                f"best {top} of them at a time) and a vocabulary of {self.vocab_size}"
            )

    @classmethod
    def of(cls, config: PreTrainedConfig) -> AssistantConfig:
        """Of HF's `Gemma4AssistantConfig` or `Gemma4UnifiedAssistantConfig`."""
        text = copy.deepcopy(config.get_text_config())
        with torch.device("meta"):
            layer = HFLayerConfig.of(AutoModel.from_config(text), like=0)
        sizes = (
            text.num_hidden_layers,
            text.vocab_size,
            text.vocab_size,
            config.backbone_hidden_size,
        )
        centroids = config.num_centroids, config.centroid_intermediate_top_k
        return cls(layer, *sizes, *(centroids if config.use_ordered_embeddings else ()))

    @property
    def hidden_size(self) -> int:
        """H: what it reads and hands on is as wide as the target."""
        return self.target_hidden_size


class AssistantHead(nn.Module):
    """HF's own text model, the projections around it and the vocabulary head. Tensors have HF's
    names, without `CENTROIDS`; the table is `lm_head.weight` only, since it is never an input.

    Args:
        config: how it is wired.
        target_ids: `None`; it has no vocabulary map.
    """

    def __init__(self, config: AssistantConfig, target_ids: Tensor | None = None):
        super().__init__()
        if target_ids is not None:
            raise ValueError(f"an assistant has no vocabulary map, got {shown(target_ids)}")
        text, self.config = copy.deepcopy(config.layer.config), config
        self.model = AutoModel.from_config(text)
        set_implementation(self.model.config, ATTENTION_FIELD, HEAD_ATTENTION)
        del self.model.embed_tokens, self.model.rotary_emb
        self.pre_projection = nn.Linear(2 * config.hidden_size, text.hidden_size, bias=False)
        self.post_projection = nn.Linear(text.hidden_size, config.hidden_size, bias=False)
        self.lm_head = nn.Linear(text.hidden_size, config.vocab_size, bias=False)
        if config.num_centroids:
            self.centroids = nn.Linear(text.hidden_size, config.num_centroids, bias=False)
            self.register_buffer("token_ordering", torch.arange(config.vocab_size))

    @classmethod
    def of(cls, model: PreTrainedModel) -> AssistantHead:
        """Of HF's `Gemma4AssistantForCausalLM` or `Gemma4UnifiedAssistantForCausalLM`, over the
        same weights; see `AssistantDrafter`.
        """
        with torch.device("meta"):
            head = cls(AssistantConfig.of(model.config))
        tensors = {name.removeprefix(CENTROIDS): x for name, x in model.state_dict().items()}
        del tensors[EMBEDDINGS]
        head.load_state_dict(tensors, assign=True)
        return head.eval()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.lm_head.weight.dtype

    def forward(
        self, embeds: Tensor, hidden: Tensor, angles: Pairs, keys_values: Pairs, attend: Attend
    ) -> Tensor:
        """Outputs `[B, N, h]`, after the final norm.

        Args:
            embeds: `[B, N, H]`, as the target's first layer gets them.
            hidden: `[B, N, H]`, the target's state after its final norm, or `feedback`.
            angles: cosines and sines `[B, 1, D]` of the queries.
            keys_values: the target's, `[B, heads, W, D]`.
            attend: of the queries `[B, heads, N, D]`.
        """
        out, text = self.pre_projection(torch.cat([embeds, hidden], dim=-1)), self.model.config
        for kind, layer in zip(text.layer_types, self.model.layers, strict=True):
            # In HF's mask the last key is at distance 0, and the window's size inclusive.
            window = text.sliding_window + 1 if kind == "sliding_attention" else None
            parts = {"position_embeddings": angles[kind], "shared_kv_states": keys_values}
            out = layer(out, attend=attend, window=window, **parts)
        return self.model.norm(out)

    def feedback(self, out: Tensor) -> Tensor:
        """`[B, N, H]`, what is read beside the next token, of outputs `[B, N, h]`."""
        return self.post_projection(out)

    def logits(self, out: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """Logits `[B, N, V]` of outputs `[B, N, h]`, without the target's `lm_head`. With centroids
        the ids of the best have logits, and all others the least of these less 1.
        """
        if not self.config.num_centroids:
            return self.lm_head(out)
        best = self.centroids(out).topk(self.config.top_centroids, dim=-1).indices
        ids = self.token_ordering.view(self.config.num_centroids, -1)[best].flatten(2).long()
        chosen = (self.lm_head.weight[ids] @ out[..., None])[..., 0]  # [B, N, ids]
        least = chosen.amin(dim=-1, keepdim=True) - 1
        return least.expand(-1, -1, self.config.vocab_size).scatter(2, ids, chosen)


@dataclass(frozen=True, eq=False)
class AssistantState:
    """How trees grow; there is nothing to remember, since the target has read the text."""

    plan: TreePlan | None = shared(default=None)


class AssistantDrafter(HeadDrafter):
    """Drafts K tokens with an assistant of Gemma 4: one after the other, or a tree.

    A pass reads the target's embedding of one token, beside the target's last state or what the
    pass before handed on. It attends over what the target's last full and last sliding layer keep
    of the text, and all passes of a step stand at the position of the last committed token.

    Transformers runs assistants at batch 1. There they see one slot more, that of a rejected token;
    and above temperature 0 it proposes the most likely tokens as if they had been drawn, so its
    text does not have the target's distribution.

    Args and Raises: as `HeadDrafter`; the head is an `AssistantHead`. `ValueError` also for a
    target whose keys the assistant cannot read.

    Example:
        >>> from transformers import AutoConfig, AutoModelForCausalLM
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 6, "vocab_size": 9, "head_dim": 4}
        >>> sizes |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
        >>> config = AutoConfig.for_model("gemma4_text", **sizes)
        >>> target = AutoModelForCausalLM.from_config(config).eval()
        >>> sizes = {"backbone_hidden_size": 8, "text_config": {**config.to_dict()}}
        >>> config = AutoConfig.for_model("gemma4_assistant", **sizes)
        >>> head = AssistantHead.of(AutoModelForCausalLM.from_config(config))
        >>> AssistantDrafter(head, target, num_draft_tokens=3).feature_layers
        ('final',)
    """

    head_type = AssistantHead
    reads_target = True

    def __init__(self, head: nn.Module, target: PreTrainedModel | Target, *args: Any, **kinds: Any):
        super().__init__(head, target, *args, **kinds)
        self._layers = _layers_read(head, model_of(target))
        layer = self.config.layer
        with torch.device("cpu"):
            self._rotary = layer.rotary_class(layer.config)
        self._rotary.to(head.device)

    def _check_head(self, head: nn.Module) -> None:
        super()._check_head(head)
        ordering = getattr(head, "token_ordering", torch.arange(0, device="cpu"))
        if not ordering.sort().values.equal(torch.arange(len(ordering), device="cpu").to(ordering)):
            raise ValueError(
                "token_ordering must hold every id of the vocabulary once; HF leaves zeros in a "
                "model without trained weights"
            )

    def save_pretrained(self, *_: Any, **__: Any) -> tuple[str, ...]:
        """Raises `ValueError`."""
        raise ValueError("transformers writes assistants; call save_pretrained of the HF model")

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> AssistantState:
        """No tensors."""
        return AssistantState(self.tree_plan(device))

    def prefill(self, context: Context, state: AssistantState) -> None:
        """The target has read the prompt."""

    def propose(self, context: Context, state: AssistantState, drawing: Drawing) -> Draft:
        """A pass of the head for each token of a path; rows without new tokens propose nothing."""
        self.check_features(context)
        last, read = context.num_new.clamp(min=0)[:, None], self._reader(context.target)
        hidden = context.features.take_along_dim((last - 1).clamp(min=0)[..., None], dim=1)
        hidden = hidden.masked_fill(last[..., None] == 0, 0)  # of which there is no feature
        out = read(context.tokens.gather(1, last), hidden)  # [B, 1, h]
        num_valid = last[:, 0].clamp(max=1) * drawing.num_draft_tokens
        if state.plan is not None:

            def expand(nodes: TreePass) -> Tensor:
                nonlocal out
                hidden = self.head.feedback(out).take_along_dim(nodes.above[..., None], dim=1)
                out = read(nodes.tokens, hidden)
                return self.logits(out)

            return state.plan.grow(self.proposal, drawing, self.logits(out), expand, num_valid)
        drafting = self.proposal.begin(drawing)
        for i in range(drawing.num_draft_tokens):
            if i > 0:
                out = read(drafting.tokens[-1], self.head.feedback(out))
            drafting.draw(self.logits(out))
        return drafting.end(num_valid)

    def _reader(self, text: TargetText) -> Callable[[Tensor, Tensor], Tensor]:
        """(tokens `[B, N]`, states `[B, N, H]`) -> outputs `[B, N, h]`, over one text."""
        keys_values = {kind: text.keys_values(layer) for kind, layer in self._layers.items()}
        window, positions = cache(text.window), text.positions[:, None]
        like = self.head.lm_head.weight
        angles = {kind: self._rotary(like, positions, kind) for kind in self._layers}

        def attend(index: int, query: Tensor, keys: Tensor, values: Tensor, options) -> Tensor:
            own = window(query.shape[2]), query.to(keys.dtype), keys, values, options
            return attend_over_slots(*own).transpose(1, 2).to(query.dtype)

        def read(tokens: Tensor, hidden: Tensor) -> Tensor:
            hidden = hidden.to(like.dtype)
            return self.head(self.embed(tokens), hidden, angles, keys_values, attend)

        return read

    def embed(self, tokens: Tensor) -> Tensor:
        """`[B, N, H]`, as the target's own module has them: scaled."""
        return self.borrowed.embeddings(tokens).to(self.head.dtype)


def _layers_read(head: AssistantHead, model: PreTrainedModel) -> dict[str, int]:
    """The target's last layer that keeps keys and values of its own, by the types of layers that an
    assistant reads.
    """
    text, layers, found = model.config.get_text_config(), decoder_layers(model)[1], {}
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(layers)
    num_own = len(layers) - (getattr(text, "num_kv_shared_layers", None) or 0)
    for kind, layer in zip(head.model.config.layer_types, head.model.layers, strict=True):
        found[kind] = max((i for i in range(num_own) if kinds[i] == kind), default=-1)
        theirs, own = getattr(layers[found[kind]], "self_attn", None), layer.self_attn
        keys, queries = getattr(theirs, "k_proj", None), own.q_proj.out_features
        fits = keys is not None and getattr(theirs, "head_dim", None) == own.head_dim
        if found[kind] < 0 or not fits or queries % keys.out_features:
            raise ValueError(
                f"the assistant reads keys of {kind} with {queries // own.head_dim} heads of "
                f"{own.head_dim}, and {type(model).__name__} has none that fit; it was made for "
                "another target"
            )
        if any(isinstance(x, DTensor) or x.device != head.device for x in theirs.parameters()):
            raise ValueError(
                f"the assistant is on {head.device}, and layer {found[kind]} of its target is on "
                "another device or spread over processes; load both on one device"
            )
    return found
