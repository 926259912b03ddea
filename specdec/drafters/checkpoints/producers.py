"""Who wrote an EAGLE checkpoint, told from its keys and names; and what no reader here supports.

Producers use the same keys with other meanings (`norm_output`, layer ids), so the reading starts
with the question who wrote them. What names are unsupported is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from specdec.drafters.checkpoints.numbers import ConfigFields
from specdec.drafters.checkpoints.safe_json import names_of

Producer = Literal["SafeAILab", "SpecForge", "speculators", "NVIDIA", "DeepSpec", "vLLM"]


@dataclass(frozen=True)
class Source:
    """Whose conventions a checkpoint follows.

    Args:
        producer: `"SafeAILab"` (yuhuili), `"SpecForge"` (lmsys), `"speculators"` (RedHatAI),
            `"NVIDIA"` (Model-Optimizer), `"DeepSpec"`, or `"vLLM"`: names and keys as vLLM reads
            them, without a mark of the producer.
        fusion: `"input"` is EAGLE-1 and EAGLE-2, `"attention"` EAGLE-3.
        why: what it was told from.
    """

    producer: Producer
    fusion: Literal["input", "attention"]
    why: str


_NVIDIA_KEYS = {
    "use_aux_hidden_state",
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "use_mtp_layernorm",
    "next_layer_regular",
    "parallel_draft_step",
}
_SPECFORGE_KEYS = {"eagle_config", "fc_norm", "norm_output", "use_aux_norm"}


def detect(fields: ConfigFields, file_names: Collection[str], names: Collection[str]) -> Source:
    """Tells the producer.

    Args:
        fields: config.json.
        file_names: tensors as the file calls them.
        names: the same, canonical.

    Raises:
        ValueError: nothing here looks like an EAGLE head.
    """
    architectures = fields.strings("architectures")
    nvidia_keys = _NVIDIA_KEYS & fields.section("eagle_config").raw.keys()
    if "speculators_model_type" in fields.raw:
        return Source("speculators", "attention", "config.json has speculators_model_type")
    if "target_layer_ids" in fields.raw and any(a.endswith("Eagle3Model") for a in architectures):
        why = f"architectures {architectures} and target_layer_ids"
        return Source("DeepSpec", "attention", why)
    if any("midlayer." in name for name in file_names):
        keys = sorted(_SPECFORGE_KEYS & fields.raw.keys())
        keys += [a for a in architectures if a.endswith("Eagle3")]
        if keys:
            return Source("SpecForge", "attention", f"tensors midlayer.* with {', '.join(keys)}")
        return Source("SafeAILab", "attention", "tensors midlayer.*, no key of another producer")
    if nvidia_keys:
        why = f"eagle_config has {sorted(nvidia_keys)[-1]}, tensors layers.0.*"
        return Source("NVIDIA", "attention", why)
    if "layers.0.hidden_norm.weight" in names:
        return Source("vLLM", "attention", "tensors layers.0.*, no key of a producer")
    if "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names:
        return Source("SafeAILab", "input", "tensors fc and layers.0.*, no hidden_norm: EAGLE-1")
    raise ValueError(
        f"{fields.origin} and its tensors do not look like an EAGLE head: no midlayer.*, no "
        f"layers.0.hidden_norm, no fc beside layers.0.*; it has {names_of(names) or 'no tensors'}"
    )


def refuse_unsupported(fields: ConfigFields, source: Source, names: Collection[str]) -> None:
    """Raises `ValueError` for what cannot be run as a sequential EAGLE head, by name.

    Args:
        fields: config.json.
        source: from `detect`.
        names: tensors, canonical.
    """
    eagle = fields.section("eagle_config")
    complaints = [
        *_other_drafters(fields, eagle, names),
        *_other_layers(fields, source, names),
        *_other_wirings(fields, eagle, source),
    ]
    if complaints:
        raise ValueError(f"{fields.origin}: not supported: {'; '.join(complaints)}")


def _other_drafters(fields: ConfigFields, eagle: ConfigFields, names: Collection[str]) -> list[str]:
    kind = fields.get("speculators_model_type", "eagle3")
    found = [f"speculators_model_type {kind!r} (expected 'eagle3')"] if kind != "eagle3" else []
    for key in ("ptd_token_id", "mask_token_id", "pard_token"):
        if fields.get(key) is not None:
            found.append(f"{key}: a parallel (mask-token) head")
    for key in ("dflash_config", "block_size", "markov_rank", "medusa_num_heads"):
        if fields.get(key) is not None:
            found.append(f"{key}: a block or Medusa drafter")
    if "mask_hidden" in names:
        found.append("tensor mask_hidden: a parallel (mask-token) head")
    if eagle.get("parallel_draft_step") is not None and eagle.integer("parallel_draft_step") > 1:
        found.append("eagle_config.parallel_draft_step > 1: parallel draft heads")
    elif any(name.startswith("parallel_draft_heads.") for name in names):
        found.append("tensors parallel_draft_heads.*: parallel draft heads")
    return found


def _other_layers(fields: ConfigFields, source: Source, names: Collection[str]) -> list[str]:
    found = []
    if fields.get("kv_lora_rank") is not None or any("kv_a_proj" in name for name in names):
        found.append("kv_lora_rank: a drafter with multi-head latent attention (MLA)")
    if any(".experts." in name for name in names):
        found.append("tensors *.experts.*: a mixture-of-experts drafter")
    if fields.flag("mlp_bias"):
        found.append("mlp_bias: biases in the MLP")
    if fields.get("quantization_config") is not None:
        found.append("quantization_config: quantised weights")
    kinds = fields.strings("layer_types")
    if source.producer in ("speculators", "DeepSpec") and set(kinds) - {"full_attention"}:
        found.append(f"layer_types {sorted(set(kinds))}: only full_attention layers")
    return found


def _other_wirings(fields: ConfigFields, eagle: ConfigFields, source: Source) -> list[str]:
    found = []
    if eagle.flag("use_mtp_layernorm"):
        found.append("eagle_config.use_mtp_layernorm: norms of an MTP module")
    if not eagle.flag("use_input_layernorm_in_first_layer", default=True):
        found.append("eagle_config.use_input_layernorm_in_first_layer: false")
    if not eagle.flag("next_layer_regular", default=True):
        found.append("eagle_config.next_layer_regular: false")
    if source.producer == "DeepSpec":
        others = [a for a in fields.strings("architectures") if a != "Qwen3Eagle3Model"]
        if others:
            found.append(f"architectures {others} (of DeepSpec, Qwen3Eagle3Model is read)")
        if fields.integer("num_hidden_layers", 1) > 1:
            found.append("num_hidden_layers > 1 (DeepSpec's layers all read the embedding)")
    return found
