"""What `gpu.py` measures: random models of real shapes, synthetic acceptance, baselines, timers.

Nothing is downloaded. Weights are random, so texts mean nothing; shapes, bytes and kernels are
those of the real models.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StaticCache,
)

from specdec import EagleDrafter, MaskTokenDrafter, MTPDrafter, SpeculativeGenerator
from specdec.heads.eagle import EagleConfig, EagleHead
from specdec.heads.layers import LayerConfig
from specdec.heads.mask_token import MaskTokenConfig, MaskTokenHead
from specdec.heads.mtp import MTPHead
from specdec.hf import cache_argument
from specdec.loop.runner import NUM_EAGER
from specdec.samplers import RejectionSampler, Sampler, Stream
from specdec.training.mtp import mtp_config
from specdec.types import PAD_TOKEN, Verdict

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_COMMON = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}


def shape_8b(**changed) -> LlamaForCausalLM:
    """Llama 3's 8B."""
    sizes = {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 16384,
    }
    return random_model(LlamaForCausalLM, LlamaConfig(**_COMMON | _ROPE | sizes | changed))


def shape_06b(**changed) -> Qwen3ForCausalLM:
    """Qwen3's 0.6B."""
    sizes = {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": True,
    }
    return random_model(Qwen3ForCausalLM, Qwen3Config(**_COMMON | _ROPE | sizes | changed))


def shape_30b_a3b(**changed) -> Qwen3MoeForCausalLM:
    """Qwen3's 30B-A3B, 61 GB in bfloat16."""
    sizes = {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 16384,
    }
    return random_model(Qwen3MoeForCausalLM, Qwen3MoeConfig(**_COMMON | _ROPE | sizes | changed))


def shape_9b_hybrid(**changed) -> Qwen3_5ForCausalLM:
    """Qwen3.5's 9B: three gated delta nets to one attention layer."""
    sizes = {
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 16384,
    }
    return random_model(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**_COMMON | sizes | changed))


TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def random_model(kind: type, config, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Built where it runs, in its data type."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            return kind(config).eval()
    finally:
        torch.set_default_dtype(before)


def eagle3(model: PreTrainedModel, num_draft_tokens: int = 3, **options) -> EagleDrafter:
    """A random one-layer EAGLE-3 head that proposes 32 000 ids, as wide as the model."""
    config = model.config
    width, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    layer = LayerConfig(
        width, config.intermediate_size, heads, config.num_key_value_heads, head_dim
    )
    depth, vocab = config.num_hidden_layers, config.vocab_size
    num_ids = min(32_000, vocab // 2)
    layers = (min(2, depth), depth // 2, max(depth - 3, 0))
    torch.manual_seed(1)
    head = EagleHead(
        EagleConfig("attention", layer, vocab, num_ids, layers, width),
        target_ids=torch.arange(num_ids),
    )
    return EagleDrafter(head.to(model.device, model.dtype), model, num_draft_tokens, **options)


def mask_token(model: PreTrainedModel, num_draft_tokens: int) -> MaskTokenDrafter:
    """A random four-layer P-EAGLE head that proposes 32 000 ids, as wide as the model."""
    theirs = eagle3(model).config
    torch.manual_seed(2)
    config = MaskTokenConfig(
        *("shifted", "input", theirs.layer, theirs.vocab_size, theirs.draft_vocab_size),
        theirs.feature_layers,
        theirs.target_hidden_size,
        num_layers=4,
        mask_token_id=0,
    )
    head = MaskTokenHead(config, target_ids=torch.arange(theirs.draft_vocab_size))
    return MaskTokenDrafter(head.to(model.device, model.dtype), model, num_draft_tokens)


def block_head(model: PreTrainedModel, correction=None, **of_layer) -> MaskTokenDrafter:
    """DSpark's shape: a block of 7 rows that predict the next token each, five layers, the target's
    vocabulary head, with a correction or without one.
    """
    theirs = eagle3(model).config
    config = MaskTokenConfig(
        *("next-token", "keys"),
        replace(theirs.layer, has_qk_norm=True, **of_layer),
        *(theirs.vocab_size, theirs.vocab_size, theirs.feature_layers, theirs.target_hidden_size),
        num_layers=5,
        mask_token_id=0,
        block_size=7,
        is_causal=False,
        has_lm_head=False,
        correction=correction,
    )
    torch.manual_seed(4)
    head = MaskTokenHead(config)
    return MaskTokenDrafter(head.to(model.device, model.dtype).eval(), model, 7)


def mtp(model: PreTrainedModel, num_depths: int = 3) -> MTPDrafter:
    """Random prediction modules, one per draft token, with the target's vocabulary head."""
    torch.manual_seed(3)
    head = MTPHead(mtp_config(model, num_depths))
    return MTPDrafter(head.to(model.device, model.dtype), model, num_depths)


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

    def forward(self, draft, target_logits, warp, noise) -> Verdict:
        """As `accept`; a greedy generation is no exception here."""
        return self.accept(draft, target_logits, warp, noise)

    def accept(self, draft, target_logits, warp, noise) -> Verdict:
        """Coins instead of the rule, whose work is done all the same."""
        verdict = self._real(draft, target_logits, warp, noise)
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
        return Verdict(tokens, num_accepted, verdict.num_drafted, verdict.faults)


def prompt(model: PreTrainedModel, length: int, rows: int = 1, seed: int = 0) -> Tensor:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (rows, length), generator=generator)
    return ids.to(DEVICE)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@dataclass
class StepTime:
    """Times of a generation's steps, with what it took to make them.

    Args:
        ms: median over rounds of the time of a step, the host's reading included.
        spread: largest minus smallest round, in ms.
        tokens_per_step: of all rows.
        capture_seconds, pool_bytes: of the graph.
        cache_bytes: keys and values of target and drafter.
    """

    ms: float
    spread: float
    tokens_per_step: float
    capture_seconds: float
    pool_bytes: int
    cache_bytes: int
    refusal: str | None = None
    extra: dict = field(default_factory=dict)


def time_steps(
    generator: SpeculativeGenerator,
    ids: Tensor,
    *,
    num_steps: int = 40,
    rounds: int = 3,
    room: int | None = None,
    **options,
) -> StepTime:
    """Steps as `generate` runs them: issued one ahead, their records read one late.

    Args:
        generator: with graphs or without.
        ids: prompts.
        num_steps: of a round.
        rounds: of which the median is taken.
        room: new tokens that a row may get; `None` is one per step, since random drafts are hardly
            ever accepted. A row that ends costs as much as before.
        options: of the generation.
    """
    width = generator.drafter.num_draft_tokens + 1
    total = num_steps * rounds + NUM_EAGER + 3
    room = room or total + 2 * width
    generation = generator.start(ids, max_new_tokens=room, eos_token_id=None, **options)
    for _ in range(NUM_EAGER + 2):
        generator.step(generation).fetch().read()
    times, num_tokens = [], 0
    for _ in range(rounds):
        synchronize()
        start, unread = time.perf_counter(), None
        for _ in range(num_steps):
            pending = generator.step(generation).fetch()
            if unread is not None:
                num_tokens += sum(len(row.new_tokens) for row in unread.read())
            unread = pending
        num_tokens += sum(len(row.new_tokens) for row in unread.read())
        synchronize()
        times.append((time.perf_counter() - start) * 1e3 / num_steps)
    runner = generation.runner
    graphs = runner.graphs.values()
    caches = [runner.state.cache, getattr(runner.state.drafter_state, "cache", None)]
    return StepTime(
        ms=statistics.median(times),
        spread=max(times) - min(times),
        tokens_per_step=num_tokens / (num_steps * rounds),
        capture_seconds=sum(graph.capture_seconds for graph in graphs),
        pool_bytes=sum(graph.num_bytes for graph in graphs),
        cache_bytes=sum(cache.size_bytes for cache in caches if cache is not None),
        refusal=runner.refusal,
    )


def per_token_ms(generate: Callable[[int], object], short: int = 8, long: int = 40) -> float:
    """Milliseconds per unit of a call that first reads a prompt: the difference of two lengths."""
    generate(short)
    times = []
    for count in (short, long):
        synchronize()
        start = time.perf_counter()
        generate(count)
        synchronize()
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) * 1e3 / (long - short)


def hf_generate_ms(model: PreTrainedModel, ids: Tensor) -> float:
    """HF's `generate` in eager mode, per token."""
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    return per_token_ms(
        lambda count: model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)
    )


def hf_assisted_ms(model: PreTrainedModel, assistant: PreTrainedModel, ids: Tensor, k: int):
    """HF's assisted generation in eager mode, per pass of the target, with its tokens per pass."""
    config = assistant.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = k, "constant"
    config.assistant_confidence_threshold = 0.0
    passes = []
    handle = model.register_forward_hook(lambda *_: passes.append(1))
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    results = []
    try:
        for count in (8, 8, 40):
            passes.clear()
            synchronize()
            start = time.perf_counter()
            model.generate(ids, assistant_model=assistant, max_new_tokens=count, **options)
            synchronize()
            results.append((time.perf_counter() - start, len(passes)))
    finally:
        handle.remove()
    (_, (short, few), (long, many)) = results
    return (long - short) * 1e3 / max(1, many - few), 32 / max(1, many - few)


class CompiledLoop:
    """A loop over `torch.compile(mode="reduce-overhead")` forwards of HF's modules with static
    caches: the target over the anchor and K tokens, a one-layer draft model K times, greedy
    comparison on the host. Every step reads K + 1 new slots, whatever is accepted.

    Args:
        model: the target.
        draft: a draft model of about the cost of a head.
        k: draft tokens.
    """

    def __init__(self, model: PreTrainedModel, draft: PreTrainedModel, k: int):
        self.k, self.models = k, (model, draft)
        options = {"mode": "reduce-overhead", "fullgraph": False}
        self.run_target = torch.compile(self._forward_of(model), **options)
        self.run_draft = torch.compile(self._forward_of(draft), **options)

    @staticmethod
    def _forward_of(model: PreTrainedModel):
        name = cache_argument(model)

        def forward(tokens, positions, cache):
            inputs = {"input_ids": tokens, "position_ids": positions, name: cache}
            return model(**inputs, use_cache=True).logits.argmax(dim=-1)

        return forward

    @torch.inference_mode(False)
    @torch.no_grad()
    def time(self, ids: Tensor, *, num_steps: int = 40, warmup: int = 6) -> float:
        """Milliseconds per step."""
        rows, length = ids.shape
        room = (num_steps + warmup) * (self.k + 1) + length + 8
        caches = [StaticCache(config=m.config, max_cache_len=room) for m in self.models]
        for model, cache in zip(self.models, caches, strict=True):
            inputs = {"input_ids": ids % model.config.vocab_size, cache_argument(model): cache}
            model(**inputs, use_cache=True)
        window = torch.zeros(rows, self.k + 1, dtype=torch.long, device=ids.device)
        offsets = torch.arange(self.k + 1, device=ids.device)
        limit = self.models[1].config.vocab_size
        start, position = 0.0, length
        for step in range(num_steps + warmup):
            if step == warmup:
                synchronize()
                start = time.perf_counter()
            token = window[:, :1]
            for i in range(self.k):
                torch.compiler.cudagraph_mark_step_begin()
                where = (position + offsets[i : i + 1]).expand(rows, 1)
                token = self.run_draft(token % limit, where, caches[1]).clone()
                window[:, i + 1 : i + 2] = token
            torch.compiler.cudagraph_mark_step_begin()
            where = (position + offsets).expand(rows, -1)
            best = self.run_target(window, where, caches[0]).clone()
            int((best[:, :-1] == window[:, 1:]).long().cumprod(1).sum(1).max())  # the host decides
            window[:, :1] = best[:, -1:]
            position += self.k + 1
        synchronize()
        return (time.perf_counter() - start) * 1e3 / num_steps


def copy_bandwidth() -> float:
    """GB/s, read and written, of a large copy on the device."""
    size = 2**30 if DEVICE == "cuda" else 2**24
    pair = torch.empty(2, size, dtype=torch.uint8, device=DEVICE)
    times = []
    for _ in range(8):
        synchronize()
        start = time.perf_counter()
        pair[1].copy_(pair[0])
        synchronize()
        times.append(time.perf_counter() - start)
    return 2 * size / statistics.median(times[2:]) / 1e9


def profile_steps(
    generator: SpeculativeGenerator, ids: Tensor, num_steps: int = 5, **options
) -> dict:
    """Launches and host synchronisations per step, time on the device, the most expensive kernels.

    Reading a record waits for an event of the step before; that is counted apart.
    """
    generation = generator.start(ids, max_new_tokens=200, eos_token_id=None, **options)
    for _ in range(NUM_EAGER + 2):
        generator.step(generation)
    synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(num_steps):
            generator.step(generation).fetch()
        synchronize()
    calls: dict[str, int] = {}
    kernels: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type.name == "CUDA":
            kernels.setdefault(event.name, []).append(event.device_time_total)
        elif event.name.startswith("cuda"):
            calls[event.name] = calls.get(event.name, 0) + 1
    waits = sum(n for name, n in calls.items() if "Synchronize" in name) - (DEVICE == "cuda")
    order = sorted(kernels, key=lambda name: -sum(kernels[name]))
    return {
        "graph_launches_per_step": calls.get("cudaGraphLaunch", 0) / num_steps,
        "kernel_launches_per_step": sum(n for name, n in calls.items() if "LaunchKernel" in name)
        / num_steps,
        "copies_per_step": sum(n for name, n in calls.items() if "MemcpyAsync" in name) / num_steps,
        "host_syncs_per_step": max(0, waits) / num_steps,
        "kernels_per_step": sum(map(len, kernels.values())) / num_steps,
        "device_ms_per_step": sum(sum(t) for t in kernels.values()) / 1e3 / num_steps,
        "five_most_expensive": [
            {
                "kernel": name[:90],
                "per_step": len(kernels[name]) / num_steps,
                "ms_per_step": sum(kernels[name]) / 1e3 / num_steps,
            }
            for name in order[:5]
        ],
        "runtime_calls": calls,
    }


def weight_bytes(*modules: torch.nn.Module) -> int:
    """Bytes that a pass reads: all weights but the embeddings, of which it reads a few rows."""
    total, seen = 0, set()
    for module in modules:
        for name, weight in module.named_parameters():
            is_table = "embed_tokens" in name and not _is_tied(module)
            if not is_table and weight.data_ptr() not in seen:
                seen.add(weight.data_ptr())
                total += weight.numel() * weight.element_size()
    return total


def _is_tied(module: torch.nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "tie_word_embeddings", False))


def save(path, results: dict) -> None:
    """JSON, whatever has been measured so far."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "gpu.json").write_text(json.dumps(results, indent=1, default=str))
