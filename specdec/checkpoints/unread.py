"""Heads that are known by name and not read: what they are, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.marks import Clues

_LATENTS = "its layers store latents (kv_lora_rank) in place of keys and values"


class Unread(NamedTuple):
    """Heads of one wiring: what they are, (clues) -> what files are recognised by, and what no head
    of the library has.
    """

    what: str
    mark: Callable[[Clues], str]
    lacks: str


UNREAD = (
    Unread(
        "a block head that attends to latents",
        lambda c: (
            c.value("dflash_config.attention_mode", "mla")
            or c.architecture(r"K3DSpark|DFlash2KimiK3|(KimiK3|Glm5_2|Deepseek)\w*(DFlash|DSpark)")
        ),
        _LATENTS,
    ),
    Unread(
        "a block head with KDA layers",
        lambda c: c.key("dflash_config.attention_modes", "linear_attn_config"),
        "its layers have a recurrent state",
    ),
    Unread(
        "a DSpine head",
        lambda c: c.key("dspine_config") or c.architecture("DSpine"),
        "its rows send each other messages",
    ),
    Unread("a DFlare head", lambda c: c.architecture(r"\w*DFlare"), "its wiring is not known"),
    Unread(
        "a DFlash head of Laguna",
        lambda c: c.architecture(r"\w*Laguna"),
        "its attention has gates (g_proj), and each feature and each layer's context a norm",
    ),
    Unread(
        "a JetSpec head of speculators",
        lambda c: c.value("speculators_model_type", "jetspec"),
        "trained on the text's own tokens, it has none for those that are not drafted yet",
    ),
    Unread(
        "a DSpark head of Gemma 4",
        lambda c: c.architecture("Gemma4DSpark"),
        "its layers are Gemma's, with norms behind their parts",
    ),
    Unread(
        "a DSpark head of DeepSeek-V4",
        lambda c: (
            c.value("speculators_model_type", "dsv4_dspark")
            or (c.architecture(r"\w*DSpark") and c.value("model_type", "deepseek_v4"))
            or c.tensor(r"mtp\.\d+\.(markov_head|main_proj)\..*")
        ),
        "its layers have hyper-connections and compressed attention",
    ),
    Unread(
        "prediction modules of Inkling",
        lambda c: c.tensor(r"model\.mtp\.layers\.0\.transformer_block\..*"),
        "their layers have short convolutions, and their targets cannot be decoded",
    ),
    Unread(
        "an EAGLE head with DeepSeek's layers",
        lambda c: c.architecture("Eagle3?Deep[Ss]eek"),
        _LATENTS,
    ),
    Unread(
        "an EAGLE head with its target's layers",
        lambda c: c.architecture("Eagle(Cohere|MiniCPM|Llama4|Mistral)"),
        "its layers are neither Llama's nor Qwen3's",
    ),
)


def check_read(clues: Clues, fields: ConfigFields) -> None:
    """`ValueError` for files of such a head."""
    for head in UNREAD:
        if why := head.mark(clues):
            raise ValueError(f"{fields.origin}: not supported: {head.what} ({why}): {head.lacks}")
