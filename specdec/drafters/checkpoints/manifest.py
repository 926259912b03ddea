"""What tensors an EAGLE head consists of: canonical names, and the shapes that its config implies.

Canonical names are those of `EagleHead.state_dict()`. Producers differ in few of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from specdec.drafters.checkpoints.safe_json import names_of
from specdec.drafters.eagle_config import EagleConfig

PREFIXES = ("model.", "speculator.")

_AUX_NORMS = {
    f"aux_norm_{level}.weight": f"fc_norm.{i}.weight"
    for i, level in enumerate(("low", "mid", "high"))
}
_LATER_HIDDEN_NORM = re.compile(r"layers\.([1-9]\d*)\.hidden_norm\.weight")

HARMLESS = {
    r"(.*\.)?rotary_emb\.inv_freq": "rotary frequencies follow from the configuration",
    r"verifier_(lm_head|norm)\.weight": "a copy of the target's, used in training only",
}
"""Names (regular expressions) of tensors that may be left unread, and why."""


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Maps canonical names to the names in the file.

    Args:
        names: tensors in the file.

    Raises:
        ValueError: two tensors in the file have the same meaning.

    Example:
        >>> canonical_names(["midlayer.hidden_norm.weight"])
        {'layers.0.hidden_norm.weight': 'midlayer.hidden_norm.weight'}
    """
    renamed = {name: _canonical(name) for name in names}
    taken, result = set(renamed.values()), {}
    for name, canonical in renamed.items():
        later = _LATER_HIDDEN_NORM.fullmatch(canonical)
        if later is not None:
            # SGLang calls the norm of layers behind the first so, everybody else input_layernorm.
            usual = f"layers.{later[1]}.input_layernorm.weight"
            canonical = canonical if usual in taken else usual
        if canonical in result:
            raise ValueError(f"{name} and {result[canonical]} are two names for one tensor")
        result[canonical] = name
    return result


def _canonical(name: str) -> str:
    while name.startswith(PREFIXES):
        name = name.partition(".")[2]
    if name.startswith("midlayer."):
        name = "layers.0." + name.removeprefix("midlayer.")
    return _AUX_NORMS.get(name, name)


def expected_tensors(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all floating-point tensors of a head."""
    hidden, features = config.hidden_size, len(config.feature_layers) * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if config.has_fc:
        joined = features + (hidden if config.fusion == "input" else 0)
        shapes |= _linear("fc", hidden, joined, config.fc_bias)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (features,)
    if config.fc_norm:
        for i in range(len(config.feature_layers)):
            shapes[f"fc_norm.{i}.weight"] = (config.target_hidden_size,)
    for i in range(config.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer(config, i).items()}
    if config.output_norm or config.feedback_norm:
        shapes["norm.weight"] = (hidden,)
    if config.has_lm_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, hidden)
    if config.has_embed_tokens:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    return shapes


def _layer(config: EagleConfig, index: int) -> dict[str, tuple[int, ...]]:
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    is_wide = config.fusion == "attention" and index == 0
    width = 2 * hidden if is_wide else hidden
    shapes = {
        **_linear("self_attn.q_proj", queries, width, config.attention_bias),
        **_linear("self_attn.k_proj", keys, width, config.attention_bias),
        **_linear("self_attn.v_proj", keys, width, config.attention_bias),
        **_linear("self_attn.o_proj", hidden, queries, config.attention_output_bias),
        **_linear("mlp.gate_proj", wide, hidden, False),
        **_linear("mlp.up_proj", wide, hidden, False),
        **_linear("mlp.down_proj", hidden, wide, False),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.has_qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    if config.fusion == "attention" or index > 0:
        shapes["input_layernorm.weight"] = (hidden,)
    if is_wide:
        shapes["hidden_norm.weight"] = (hidden,)
    return shapes


def _linear(name: str, rows: int, columns: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    weight = {f"{name}.weight": (rows, columns)}
    return weight | ({f"{name}.bias": (rows,)} if has_bias else {})


def compare(
    config: EagleConfig, shapes: Mapping[str, tuple[int, ...]], unused: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Compares the tensors that there are with those that there should be.

    Args:
        config: the head.
        shapes: canonical names and shapes of the tensors in the file.
        unused: further names that may be left unread, each with the reason.

    Returns:
        What is wrong, in words, empty if nothing is; and the tensors to be left unread, each with
        the reason.
    """
    expected = expected_tensors(config)
    maps = {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    expected |= {name: shape for name, shape in maps.items() if name in shapes}
    unread = {
        name: unused.get(name) or _harmless(name)
        for name in shapes.keys() - expected.keys()
        if name in unused or _harmless(name)
    }
    missing = expected.keys() - shapes.keys()
    unexpected = shapes.keys() - expected.keys() - unread.keys()
    faults = [f"missing {names_of(missing)}"] if missing else []
    faults += [f"unexpected {names_of(unexpected)}"] if unexpected else []
    for name in sorted(expected.keys() & shapes.keys()):
        if shapes[name] != expected[name]:
            faults.append(f"{name} has shape {list(shapes[name])}, not {list(expected[name])}")
    return faults, unread


def _harmless(name: str) -> str | None:
    return next((why for pattern, why in HARMLESS.items() if re.fullmatch(pattern, name)), None)
