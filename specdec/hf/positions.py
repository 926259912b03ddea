"""How many positions a model can be given, and why they are fewer than its configuration says."""

from __future__ import annotations

from transformers import PreTrainedConfig


def position_limit(config: PreTrainedConfig) -> int | None:
    """Positions that the model can be given.

    Rotary scalings that look at the longest position of a forward ("longrope", "dynamic") change
    every position's angle once it passes the original range. Plain decoding switches in mid-text; a
    batch of drafts cannot, so such models are served within that range.

    A layer of Doge reads the `keep_window_size` keys whose values score highest. Equal tokens have
    equal values in its first layer, and which of them HF's `topk` takes depends on the number of
    keys: such models are served while all keys are read.
    """
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    kept = getattr(config, "keep_window_size", None)
    limit = min(limit, kept) if limit and kept else limit
    for parameters in _switching_ropes(config):
        original = parameters.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        limit = min(limit, original or limit)
    return limit


def cause_of_limit(config: PreTrainedConfig) -> str:
    """Why a model is given fewer positions than it is said to have, for messages."""
    kinds = [repr(parameters["rope_type"]) for parameters in _switching_ropes(config)]
    if not kinds and getattr(config, "keep_window_size", None) == position_limit(config):
        return ": beyond it layers choose keys, by values that may be equal (`keep_window_size`)"
    if not kinds:
        return ""
    return (
        f": from there on its rotary scaling ({', '.join(dict.fromkeys(kinds))}) turns all tokens "
        "by other angles, which happens in mid-text and cannot be taken back for a rejected draft"
    )


def _switching_ropes(config: PreTrainedConfig) -> list[dict]:
    rope = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    found = (rope, *per_layer_type)
    return [each for each in found if each.get("rope_type") in ("longrope", "dynamic")]
