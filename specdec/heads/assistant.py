"""`AssistantHead`: an assistant of Gemma 4, whose layers have queries only and read the target's
keys and values.

Legend: B rows, N tokens, H width of the target, h width of the assistant's layers, V vocabulary, W
slots, C centroids.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from specdec.arguments import check_integer, shown
from specdec.heads.config import check_fields
from specdec.heads.hf_layer import HEAD_ATTENTION, HFLayerConfig
from specdec.heads.layers import Attend

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AssistantConfig:
    """What HF's configuration of an assistant says, in the words of heads.

    Args:
        layer: of the assistant's text model.
        target_hidden_size: H.
        num_centroids: C, groups that the ids are sorted into; 0 for a vocabulary head over all ids.
        top_centroids: groups whose ids have logits of their own.
    """

    layer: HFLayerConfig
    target_hidden_size: int
    num_centroids: int = 0
    top_centroids: int = 0

    # What all of them have in common: an output table of its own, embeddings of the target.
    feature_layers = ("final",)
    has_embed_tokens, has_lm_head, ties_embeddings = False, True, True

    def __post_init__(self):
        check_fields(self)
        if not self.num_centroids:
            return
        check_integer("top_centroids", self.top_centroids, 1, self.num_centroids)
        if self.vocab_size % self.num_centroids:
            raise ValueError(
                f"{self.num_centroids} centroids must share out the vocabulary of "
                f"{self.vocab_size} evenly (num_centroids, vocab_size)"
            )

    @classmethod
    def of(cls, config: PreTrainedConfig) -> AssistantConfig:
        """As HF's `Gemma4AssistantConfig` or `Gemma4UnifiedAssistantConfig` describes it."""
        with torch.device("meta"):
            model = AutoModel.from_config(copy.deepcopy(config.get_text_config()))
        centroids = (config.num_centroids, config.centroid_intermediate_top_k)
        layer, width = HFLayerConfig.of(model, like=0), config.backbone_hidden_size
        return cls(layer, width, *(centroids if config.use_ordered_embeddings else ()))

    @property
    def layer_types(self) -> list[str]:
        """Of each layer, `"full_attention"` or `"sliding_attention"`."""
        return self.layer.config.layer_types

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.layer.config.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        """H: what it reads and hands on is as wide as the target."""
        return self.target_hidden_size

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.layer.config.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        """All ids of the target."""
        return self.vocab_size


class AssistantHead(nn.Module):
    """HF's own text model, the projections around it and the vocabulary head. Tensors have HF's
    names; the table, which is never read as an input, is `lm_head.weight` only.

    Args:
        config: how it is wired.
        target_ids: must be `None`; all ids of the target can be proposed.
    """

    def __init__(self, config: AssistantConfig, target_ids: Tensor | None = None):
        super().__init__()
        if target_ids is not None:
            raise ValueError(f"an assistant has no vocabulary map, got {shown(target_ids)}")
        text, self.config = copy.deepcopy(config.layer.config), config
        width = text.hidden_size
        self.model = AutoModel.from_config(text)
        self.model.config._attn_implementation = HEAD_ATTENTION
        del self.model.embed_tokens, self.model.rotary_emb
        self.pre_projection = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.post_projection = nn.Linear(width, config.hidden_size, bias=False)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        if config.num_centroids:
            self.centroids = nn.Linear(width, config.num_centroids, bias=False)
            self.register_buffer("token_ordering", torch.arange(config.vocab_size))

    @classmethod
    def of(cls, model: PreTrainedModel) -> AssistantHead:
        """The head of HF's `Gemma4AssistantForCausalLM` or `Gemma4UnifiedAssistantForCausalLM`,
        over the same weights.

        Example:
            >>> from transformers import AutoConfig, AutoModelForCausalLM
            >>> sizes = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 9, "head_dim": 4}
            >>> sizes |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
            >>> text = AutoConfig.for_model("gemma4_text", **sizes)
            >>> kind = {"model_type": "gemma4_assistant", "backbone_hidden_size": 6}
            >>> config = AutoConfig.for_model(**kind, text_config=text)
            >>> AssistantHead.of(AutoModelForCausalLM.from_config(config)).config.hidden_size
            6
        """
        with torch.device("meta"):
            head = cls(AssistantConfig.of(model.config))
        tensors = {name.removeprefix(PREFIX): x for name, x in model.state_dict().items()}
        tensors.pop(EMBEDDINGS)  # tied or not, the vocabulary head is what is used
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
        self,
        embeds: Tensor,
        hidden: Tensor,
        angles: Mapping[str, Pair],
        keys_values: Mapping[str, Pair],
        attend: Attend,
    ) -> Tensor:
        """Reads tokens.

        Args:
            embeds: `[B, N, H]`, as the target's first layer gets them.
            hidden: `[B, N, H]`, the target's state after its final norm, or `feedback`.
            angles: by type of layer, cosines and sines `[B, 1, D]` of the queries.
            keys_values: by type of layer, the target's, `[B, heads, W, D]`.
            attend: of the queries `[B, heads, N, D]`.

        Returns:
            `[B, N, h]`, after the final norm.
        """
        out = self.pre_projection(torch.cat([embeds, hidden], dim=-1))
        for kind, layer in zip(self.config.layer_types, self.model.layers, strict=True):
            # HF's mask of an assistant has the last key at distance 0, and its window inclusive.
            is_sliding = kind == "sliding_attention"
            window = self.model.config.sliding_window + 1 if is_sliding else None
            out = layer(
                out,
                shared_kv_states=keys_values,
                position_embeddings=angles[kind],
                attend=attend,
                window=window,
            )
        return self.model.norm(out)

    def feedback(self, out: Tensor) -> Tensor:
        """`[B, N, H]`, what is read beside the next token, of outputs `[B, N, h]`."""
        return self.post_projection(out)

    def logits(self, out: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """Logits `[B, N, V]` of outputs `[B, N, h]`; the target's vocabulary head is not used. With
        centroids, of the ids of the best of them, and for all others the least of these less 1.
        """
        if not self.config.num_centroids:
            return self.lm_head(out)
        best = self.centroids(out).topk(self.config.top_centroids, dim=-1).indices
        ids = self.token_ordering.view(self.config.num_centroids, -1)[best].flatten(2)  # [B, N, n]
        chosen = (self.lm_head.weight[ids] @ out[..., None])[..., 0]
        rest = chosen.amin(dim=-1, keepdim=True) - 1
        return rest.expand(-1, -1, self.config.vocab_size).scatter(2, ids, chosen)


PREFIX = "masked_embedding."
"""Of HF's names of what centroids are made of."""
EMBEDDINGS = "model.embed_tokens.weight"
"""HF's name of the table, which an assistant's vocabulary head is tied to."""
