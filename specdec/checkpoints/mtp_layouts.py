"""How producers name and wire prediction modules: a table.

Legend: N layers of the target, D depths.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from specdec.checkpoints import hf_layers
from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.layers import read_layer
from specdec.drafters.head.hf_layer import HFLayerConfig
from specdec.drafters.mtp.head import MTPConfig

_USUAL = {name: name for name in ("enorm.", "hnorm.", "eh_proj.")}


@dataclass(frozen=True, eq=False)
class Layout:
    """How a producer names and wires prediction modules.

    Args:
        mark: regular expression of a name that only such files have; N is the number of the
            target's layers.
        pattern: how the names of a depth begin, with the group `depth` where they have a number.
        names: what follows, and its name in `MTPDepth`, or in the head itself after a slash, where
            that differs. A key that ends with a dot is a prefix. Names that are neither listed nor
            those of `MTPDepth` are of the decoder layer.
        layer: (HF model) -> the decoder layer, of the target's architecture; `None` is the
            library's own layer, with biases of queries, keys and values.
        flags: of `MTPConfig`. `target_state="pre"` is boundary L.
        counts_from_target: depths are numbered from the target's layer count on.
        shares_head: vocabulary heads that are stored with several depths are copies of one.
        stems: how names begin in files that the library writes: those of a depth's own parts, and
            those of its decoder layer. Empty for layouts that it only reads.
        keys: that config.json has in such files, beside the number of depths.
        targets: model types that such files are written for; empty: all.
        notes: where engines disagree.
    """

    producer: str
    mark: str
    pattern: str
    names: dict[str, str]
    layer: Callable[[PreTrainedModel], HFLayerConfig] | None = hf_layers.last_layer
    flags: dict[str, Any] = field(default_factory=dict)
    counts_from_target: bool = False
    shares_head: bool = True
    stems: tuple[str, ...] = ()
    keys: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def depth_and_rest(self, name: str, num_layers: int) -> tuple[int, str] | None:
        """The depth that a tensor belongs to, and its name there; `None` for any other tensor."""
        found = re.match(self.pattern, name)
        if found is None:
            return None
        depth = int(found.groupdict().get("depth") or 0)
        depth -= num_layers if self.counts_from_target else 0
        return (depth, name[found.end() :]) if depth >= 0 else None

    def canonical(self, depth: int, rest: str, num_depths: int) -> str:
        """The head's name of a tensor."""
        for key, name in (_USUAL | self.names).items():
            if rest == key or (key.endswith(".") and rest.startswith(key)):
                rest = name + rest[len(key) :]
                break
        else:
            rest = f"block.{rest}"
        if rest.startswith("/"):
            is_shared = self.shares_head or rest.startswith("/embed_tokens") or num_depths == 1
            return rest[1:] if is_shared and depth == 0 else f"layers.{depth}.{rest[1:]}"
        if rest.startswith("block.") and self.layer is not None:
            rest = f"block.layer.{rest.removeprefix('block.')}"
        return f"layers.{depth}.{rest}"

    def stored(self, depth: int, rest: str, num_layers: int) -> str:
        """The name in a file that the library writes: of a tensor `rest` of `MTPDepth`, or of one
        of the head itself, after a slash.
        """
        own, of_layer = self.stems[0], self.stems[-1]
        depth += num_layers if self.counts_from_target else 0
        for name, ours in (self.names | _USUAL).items():
            if rest.startswith(ours):
                return own.format(depth=depth) + name + rest.removeprefix(ours)
        rest = rest.removeprefix("block.").removeprefix("layer.")
        return of_layer.format(depth=depth) + rest

    def config_of(
        self, text: ConfigFields, model: PreTrainedModel | None, num_depths: int
    ) -> MTPConfig:
        """The head that such names mean.

        Args:
            text: configuration of the target's language model.
            model: the target, or one of its classes without weights; not read where the layers
                are the library's own.
            num_depths: D.
        """
        flags = dict(self.flags)
        if flags.get("target_state") == "pre":
            flags["target_state"] = text.integer("num_hidden_layers", high=hf_layers.MAX_LAYERS)
        if self.layer is None:
            layer = read_layer(text, attention_bias=True)
        else:
            layer = self.layer(model)
            flags["centred_norms"] = hf_layers.has_centred_norms(model)
        return MTPConfig(layer, text.integer("vocab_size"), num_depths, **flags)


_NUMBERED = r"(?:model\.)?(?:language_model\.)?layers\.(?P<depth>\d+)\."
_PRE = "the target's state before its final norm"

LAYOUTS = (
    Layout(
        producer="Qwen",
        mark=r"mtp\.fc\.weight",
        pattern=r"mtp\.(?:layers\.(?P<depth>\d+)\.)?",
        names={
            "fc.": "eh_proj.",
            "pre_fc_norm_embedding.": "enorm.",
            "pre_fc_norm_hidden.": "hnorm.",
            "norm.": "norm.",
            "embed_tokens.": "/embed_tokens.",
            "lm_head.": "/lm_head.",
        },
        stems=("mtp.", "mtp.layers.{depth}."),
        keys={"mtp_num_hidden_layers": 1},
    ),
    Layout(
        producer="MiMo",
        mark=r"model\.mtp_layers\.0\.input_proj\.weight",
        pattern=r"model\.mtp_layers\.(?P<depth>\d+)\.",
        names={
            "token_layernorm.": "enorm.",
            "hidden_layernorm.": "hnorm.",
            "input_proj.": "eh_proj.",
            "final_layernorm.": "norm.",
        },
        layer=None,
        flags={"hidden_first": True, "target_state": "pre", "zero_first_embedding": True},
        stems=("model.mtp_layers.{depth}.",),
        keys={"architectures": ["MiMoForCausalLM"]},
        targets=("qwen2", "mimo"),
        notes=(f"the first depth reads {_PRE}, as in vLLM; SGLang hands in the normalised one",),
    ),
    Layout(
        producer="MiMo-V2",
        mark=r"model\.mtp\.layers\.0\.pre_mlp_layernorm\.weight",
        pattern=r"model\.mtp\.layers\.(?P<depth>\d+)\.",
        names={
            "final_layernorm.": "norm.",
            "pre_mlp_layernorm.": "block.post_attention_layernorm.",
            "self_attn.attention_sink_bias": "block.self_attn.sinks",
        },
        layer=hf_layers.dense_layer(layer_types="sliding_attention", mlp_layer_types="dense"),
        flags={"semantics": "target", "target_state": "pre"},
        notes=(
            f"every depth reads {_PRE}, as in SGLang; vLLM runs one depth on the normalised state",
        ),
    ),
    Layout(
        producer="Ernie",
        mark=r"model\.mtp_linear_proj\.0\.weight",
        pattern=r"model\.(?=mtp_)",
        names={
            "mtp_emb_norm.0.": "enorm.",
            "mtp_hidden_norm.0.": "hnorm.",
            "mtp_linear_proj.0.": "eh_proj.",
            "mtp_block.0.": "block.",
        },
        layer=hf_layers.dense_layer(moe_layer_start_index=1),
        flags={"output_norm": False, "feedback_norm": False, "zero_first_embedding": True},
        notes=(
            "the block rotates pairs of channels as its target does; vLLM runs it as a Llama layer",
        ),
    ),
    Layout(
        producer="Step",
        mark=r"(model\.)?(language_model\.)?layers\.N\.transformer\..*",
        pattern=_NUMBERED,
        counts_from_target=True,
        names={
            "transformer.shared_head.norm.": "norm.",
            "transformer.shared_head.output.": "/lm_head.",
            "transformer.embed_tokens.": "/embed_tokens.",
            "transformer.": "block.",
            "embed_tokens.": "/embed_tokens.",
        },
        layer=hf_layers.prediction_layer,
        flags={"target_state": "pre", "feedback_norm": False},
        shares_head=False,
    ),
    Layout(
        producer="DeepSeek",
        mark=r"(model\.)?(language_model\.)?layers\.N\.eh_proj\.weight",
        pattern=_NUMBERED,
        counts_from_target=True,
        names={
            "shared_head.norm.": "norm.",
            "shared_head.head.": "/lm_head.",
            "embed_tokens.": "/embed_tokens.",
        },
        stems=("model.layers.{depth}.",),
        notes=("the embedding at position 0 is read as it is; vLLM zeroes it",),
    ),
)
