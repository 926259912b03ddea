"""Steps of a target whose cache keeps latents (MLA), behind longer and longer texts: attention to
the latents themselves, beside keys and values that are made of all of them in every step, and
beside Hugging Face's `generate`.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/latents.py --tokens 64 1024 4096

Four of DeepSeek-V2-Lite's layers (one dense, three with 64 experts) in their real widths, with
random weights, on a CPU too. Times as those of `gpu.py`.
"""

import argparse
import gc
from unittest.mock import patch

import torch
from gpu import Steps, hf_generate
from timing import DEVICE, Turns, about, show
from transformers import AutoModelForCausalLM, DeepseekV2Config, PreTrainedModel

from specdec import PromptLookupDrafter, Target
from specdec.targets.edits.latents import Latents


def target_of(layers: int, tokens: int, dtype: torch.dtype) -> PreTrainedModel:
    """With a small vocabulary, so that little but its layers is measured."""
    config = DeepseekV2Config(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=10_944,
        moe_intermediate_size=1408,
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        max_position_embeddings=tokens,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def main() -> None:
    """As on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    arguments = parser.parse_args()
    room = max(arguments.tokens) + 4096
    model = target_of(arguments.layers, room, getattr(torch, arguments.dtype))
    model.generation_config.prefill_chunk_size = chunk = 512
    latents = Target(model)
    with patch.object(Latents, "of", classmethod(lambda cls, model: (None, None))):
        expanded = Target(model)
    print(about(), *latents.notes, sep="\n", flush=True)
    lookup = PromptLookupDrafter(3)
    for tokens in arguments.tokens:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 32_000, (1, tokens), generator=generator).to(DEVICE)
        sides = {
            "latents, no drafter": Steps(latents, None, ids, chunk=chunk),
            "latents, lookup, K = 3": Steps(latents, lookup, ids, chunk=chunk),
            "keys and values, no drafter": Steps(expanded, None, ids, chunk=chunk),
            "keys and values, lookup, K = 3": Steps(expanded, lookup, ids, chunk=chunk),
            "HF generate, per token": hf_generate(model, ids),
        }
        times, first = Turns().run(sides, arguments.rounds), next(iter(sides))
        rows = [[n, f"{times.ms(n):.2f}", f"{times.ratio(n, first):.2f}"] for n in sides]
        print(
            f"\n{arguments.layers} layers of DeepSeek-V2-Lite, {arguments.dtype}, {tokens} tokens\n"
        )
        show("|ms|x", rows)
        del sides
        gc.collect()


if __name__ == "__main__":
    main()
