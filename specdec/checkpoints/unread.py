"""Heads that are known by name and not read: what they are, and why."""

from __future__ import annotations

from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.marks import Clues

_LATENTS = "whose layers store latents (kv_lora_rank) in place of keys and values"
_OVER_LATENTS = r"K3DSpark|DFlash2KimiK3|(KimiK3|Glm5_2|Deepseek)\w*(DFlash|DSpark)"

UNREAD = {
    f"a block head {_LATENTS}": lambda c: (
        c.value("dflash_config.attention_mode", "mla") or c.architecture(_OVER_LATENTS)
    ),
    "a block head with KDA layers, which have a recurrent state": lambda c: c.key(
        "dflash_config.attention_modes", "linear_attn_config"
    ),
    "a DSpine head, whose rows send each other messages": lambda c: (
        c.key("dspine_config") or c.architecture("DSpine")
    ),
    "a DFlare head, of which no wiring is known": lambda c: c.architecture(r"\w*DFlare"),
    "a DFlash head of Laguna, whose attention has gates (g_proj), and each feature and each "
    "layer's context a norm": lambda c: c.architecture(r"\w*Laguna"),
    "a JetSpec head of speculators, which reads tokens of the text that are not drafted "
    "yet": lambda c: c.value("speculators_model_type", "jetspec"),
    "a DSpark head of Gemma 4, which has norms behind the parts of layers": lambda c: (
        c.architecture("Gemma4DSpark")
    ),
    "a DSpark head of DeepSeek-V4, with hyper-connections and compressed attention": lambda c: (
        c.value("speculators_model_type", "dsv4_dspark")
        or (c.architecture(r"\w*DSpark") and c.value("model_type", "deepseek_v4"))
        or c.tensor(r"mtp\.\d+\.(markov_head|main_proj)\..*")
    ),
    "prediction modules of Inkling, whose layers have short convolutions; its models are no "
    "targets": lambda c: c.tensor(r"model\.mtp\.layers\.0\.transformer_block\..*"),
    f"an EAGLE head with DeepSeek's layers, {_LATENTS}": lambda c: c.architecture(
        "Eagle3?Deep[Ss]eek"
    ),
    "an EAGLE head with its target's layers, which are neither Llama's nor Qwen3's": lambda c: (
        c.architecture("Eagle(Cohere|MiniCPM|Llama4|Mistral)")
    ),
}
"""What heads are, and (clues) -> what files of them are recognised by, in words."""


def check_read(clues: Clues, fields: ConfigFields) -> None:
    """`ValueError` for files of such a head."""
    for what, mark in UNREAD.items():
        if why := mark(clues):
            raise ValueError(f"{fields.origin}: not supported ({why}): {what}")
