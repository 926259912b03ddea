"""Random models of real shapes, random heads for them, and a sampler with synthetic acceptance.

Nothing is downloaded. Weights are random, so texts mean nothing; shapes, bytes and kernels are
those of the real models. Without a GPU the models are small ones of the same kinds.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from timing import DEVICE
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdec import EagleDrafter, MaskTokenDrafter, MTPDrafter
from specdec.drafters.eagle import EagleHead
from specdec.drafters.eagle_config import EagleConfig
from specdec.drafters.head.layer_config import LayerConfig
from specdec.drafters.mask_token.head import MaskTokenConfig, MaskTokenHead
from specdec.drafters.mask_token.lattice import LiLiCorrConfig
from specdec.drafters.mtp.head import MTPHead
from specdec.lab.training.mtp import mtp_config
from specdec.samplers import RejectionSampler, Sampler, Stream
from specdec.types import PAD_TOKEN, Verdict

NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
NAMES += ("num_attention_heads", "num_key_value_heads", "head_dim", "model_type")
SHAPES = {
    "8B": (128_256, 4096, 14336, 32, 32, 8, 128, "llama"),
    "Qwen3-8B": (151_936, 4096, 12288, 36, 32, 8, 128, "qwen3"),
    "0.6B": (151_936, 1024, 3072, 28, 16, 8, 128, "qwen3"),
    "30B-A3B": (151_936, 2048, 6144, 48, 32, 4, 128, "qwen3_moe"),  # 61 GB
    "9B hybrid": (248_320, 4096, 12288, 32, 16, 4, 256, "qwen3_5_text"),
    "V3.2, five layers": (129_280, 7168, 18432, 5, 128, 128, 64, "deepseek_v32"),  # 57 GB
}
SMALL = dict(zip(NAMES, (512, 64, 128, 4, 4, 2, 16), strict=False))
OTHERS = {  # sizes of one kind of model, with those of small models
    "30B-A3B": {
        "moe_intermediate_size": (768, 32),
        "num_experts": (128, 8),
        "num_experts_per_tok": (8, 2),
    },
    "9B hybrid": {
        "linear_num_key_heads": (16, 16),
        "linear_num_value_heads": (32, 32),
        "linear_key_head_dim": (128, 16),
        "linear_value_head_dim": (128, 16),
    },
    "V3.2, five layers": {
        "num_key_value_heads": (128, 4),
        "first_k_dense_replace": (3, 3),
        "n_routed_experts": (256, 16),
        "moe_intermediate_size": (2048, 32),
        "q_lora_rank": (1536, 32),
        "kv_lora_rank": (512, 16),
        "index_topk": (2048, 8),
    },
}


def shape(name: str, **changed) -> PreTrainedModel:
    """A model of SHAPES in bfloat16, built where it runs; without a GPU a small one of its kind."""
    config = config_of(name, **changed)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def config_of(name: str, **changed) -> PreTrainedConfig:
    """The configuration of a model of SHAPES; without a GPU of a small one of its kind."""
    is_small = DEVICE == "cpu"
    sizes = dict(zip(NAMES, SHAPES[name], strict=True))
    sizes |= {"max_position_embeddings": 16384} | changed
    if is_small:
        sizes |= {key: min(sizes[key], size) for key, size in SMALL.items()}
    others = {key: pair[is_small] for key, pair in OTHERS.get(name, {}).items()}
    sizes |= {key: size for key, size in others.items() if key not in changed}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return AutoConfig.for_model(**sizes, **special, tie_word_embeddings=name == "0.6B")


def prompt(model: PreTrainedModel, length: int, rows: int = 1, seed: int = 0) -> Tensor:
    """Random tokens; at most 24 a row without a GPU."""
    generator = torch.Generator().manual_seed(seed)
    size = rows, length if DEVICE == "cuda" else min(length, 24)
    return torch.randint(0, model.config.vocab_size, size, generator=generator).to(DEVICE)


def eagle3(model: PreTrainedModel, num_draft_tokens: int = 3, **options) -> EagleDrafter:
    """A one-layer EAGLE-3 head that proposes 32 000 ids, as wide as the model."""
    config = model.config
    width, heads, depth = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    sizes = config.intermediate_size, heads, config.num_key_value_heads
    layer = LayerConfig(width, *sizes, getattr(config, "head_dim", None) or width // heads)
    num_ids = min(32_000, config.vocab_size // 2)
    layers = (min(2, depth), depth // 2, max(depth - 3, 0))
    torch.manual_seed(1)
    head = EagleHead(
        EagleConfig("attention", layer, config.vocab_size, num_ids, layers, width),
        target_ids=torch.arange(num_ids),
    )
    return EagleDrafter(head.to(model.device, model.dtype), model, num_draft_tokens, **options)


def mask_token(model: PreTrainedModel, num_draft_tokens: int) -> MaskTokenDrafter:
    """A four-layer P-EAGLE head that proposes 32 000 ids, as wide as the model."""
    theirs = eagle3(model).config
    config = MaskTokenConfig(
        *("shifted", "input", theirs.layer, theirs.vocab_size, theirs.draft_vocab_size),
        *(theirs.feature_layers, theirs.target_hidden_size),
        num_layers=4,
        mask_token_id=0,
    )
    head = MaskTokenHead(config, target_ids=torch.arange(theirs.draft_vocab_size))
    return MaskTokenDrafter(head.to(model.device, model.dtype), model, num_draft_tokens)


def block_head(model: PreTrainedModel, correction=None, **of_layer) -> MaskTokenDrafter:
    """DSpark's shape: a block of 7 rows that predict the next token each, five layers, the target's
    vocabulary head, with a correction or without one. A lattice has DFlash's: 7 masks after the
    last token, which predict their own.
    """
    is_lattice = isinstance(correction, LiLiCorrConfig)
    theirs = eagle3(model).config
    config = MaskTokenConfig(
        *("same-position" if is_lattice else "next-token", "keys"),
        replace(theirs.layer, has_qk_norm=True, **of_layer),
        *(theirs.vocab_size, theirs.vocab_size, theirs.feature_layers, theirs.target_hidden_size),
        num_layers=5,
        mask_token_id=0,
        block_size=7 + is_lattice,
        is_causal=False,
        has_lm_head=False,
        correction=correction,
    )
    head = MaskTokenHead(config)
    return MaskTokenDrafter(head.to(model.device, model.dtype).eval(), model, 7)


def mtp(model: PreTrainedModel) -> MTPDrafter:
    """Three prediction modules, one per draft token, with the target's vocabulary head."""
    torch.manual_seed(3)
    head = MTPHead(mtp_config(model, 3))
    return MTPDrafter(head.to(model.device, model.dtype), model, 3)


class DialledSampler(Sampler):
    """Synthetic acceptance: a real verdict is computed, and then replaced by coins. Each draft
    token is accepted with a given probability, if all before it were; the extra token is the
    target's most likely one. Costs are real, texts are not.

    Args:
        acceptance: probability of each token.
    """

    lossless = False

    def __init__(self, acceptance: float):
        super().__init__()
        self.acceptance = acceptance
        self._real = RejectionSampler()

    def forward(self, draft, target_logits, logits_filter, noise) -> Verdict:
        """As `accept`; a greedy generation is no exception here."""
        return self.accept(draft, target_logits, logits_filter, noise)

    def accept(self, draft, target_logits, logits_filter, noise) -> Verdict:
        """Coins instead of the rule, whose work is done all the same."""
        verdict = self._real(draft, target_logits, logits_filter, noise)
        width = draft.tokens.shape[1]
        coins = noise.uniform(Stream.ACCEPT)[:, :width] < self.acceptance
        num_accepted = coins.cumprod(dim=1, dtype=torch.long).sum(dim=1)
        if draft.num_valid is not None:
            num_accepted = torch.minimum(num_accepted, draft.num_valid)
        index = torch.arange(width + 1, device=target_logits.device)
        best = target_logits.argmax(dim=-1)
        tokens = torch.cat([draft.tokens, best[:, -1:]], dim=1)
        tokens = torch.where(index == num_accepted[:, None], best, tokens)
        tokens = torch.where(index <= num_accepted[:, None], tokens, PAD_TOKEN)
        return Verdict(tokens, num_accepted, verdict.num_drafted)
