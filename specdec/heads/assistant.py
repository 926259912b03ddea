"""`AssistantHead`: an assistant of Gemma 4, layers of queries over the target's keys and values.

Legend: B rows, N tokens, H width of the target, h width of the assistant, V vocabulary, W slots.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from specdec.arguments import shown
from specdec.heads.hf_layer import HEAD_ATTENTION, HFLayerConfig
from specdec.heads.layers import Attend

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
        self.model.config._attn_implementation = HEAD_ATTENTION
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
