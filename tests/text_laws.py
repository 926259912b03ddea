"""Exact distributions of short texts of a six-token target, and runs to hold against them."""

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
import scipy.stats
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specdec import SpeculativeGenerator

VOCAB, NUM_NEW = 6, 3
ROWS, MANY = 3_000, 10_000  # texts of a test, and of a slow one
TARGET, DRAFT = 3, 27  # they share 60 % of their first token's law
ALPHA, POWER = 1e-9, 0.99
PROMPT = [1, 4, 2, 1, 4]  # n-gram lookup proposes 2, 1 behind it
FILTERS = {
    "plain": ({"temperature": 1.0, "top_k": 0}, []),
    "truncated": (
        {"temperature": 0.8, "top_k": 4, "top_p": 0.9},
        [TemperatureLogitsWarper(0.8), TopKLogitsWarper(4), TopPLogitsWarper(0.9)],
    ),
    "typical": (  # which the library leaves to HF's own processors
        {"generation_config": GenerationConfig(temperature=0.8, top_k=5, typical_p=0.7)},
        [TemperatureLogitsWarper(0.8), TopKLogitsWarper(5), TypicalLogitsWarper(0.7)],
    ),
}


@cache
def tiny(seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3, generator=generator)
    return model


@cache
def law(seed: int, logits_filter: str) -> dict[tuple, list[float]]:
    """The next token's law behind every continuation of the prompt by at most two tokens."""
    table = {}
    model = tiny(seed)
    for length in range(NUM_NEW):
        ends = list(itertools.product(range(VOCAB), repeat=length))
        ids = torch.tensor([[*PROMPT, *end] for end in ends])
        with torch.no_grad():
            logits = model(ids).logits[:, -1].double()
        logits = LogitsProcessorList(FILTERS[logits_filter][1])(ids, logits)
        table |= dict(zip(ends, logits.softmax(dim=-1).tolist(), strict=True))
    return table


def text_law(logits_filter: str, length: int) -> dict[tuple, float]:
    """The law of the first `length` tokens."""
    table, laws = law(TARGET, logits_filter), {(): 1.0}
    for _ in range(length):
        laws = {(*e, x): p * table[e][x] for e, p in laws.items() for x in range(VOCAB)}
    return laws


def step_law(logits_filter: str) -> dict[tuple, float]:
    """The law of (drafts accepted, tokens emitted) in the first step; the model drafts, K = 2."""
    target, draft = law(TARGET, logits_filter), law(DRAFT, logits_filter)
    laws, reached = {}, {(): 1.0}
    for count in range(2):
        accepted = {}
        for end, mass in reached.items():
            for x, (p, q) in enumerate(zip(target[end], draft[end], strict=True)):
                accepted[(*end, x)] = mass * min(p, q)
                laws[count, (*end, x)] = mass * max(0.0, p - q)
        reached = accepted
    laws |= {(2, (*e, x)): m * target[e][x] for e, m in reached.items() for x in range(VOCAB)}
    return laws


def p_value(observed: Counter, laws: dict) -> float:
    """Of Pearson's chi-square; cells that expect fewer than 10 are merged into one."""
    assert sum(laws.values()) == pytest.approx(1)
    num_seen = sum(observed.values())
    if any(laws.get(cell, 0.0) <= 0 for cell in observed):
        return 0.0  # something impossible happened
    expected = {cell: num_seen * p for cell, p in laws.items() if p > 0}
    small = [cell for cell, count in expected.items() if count < 10]
    pairs = [(observed[c], count) for c, count in expected.items() if count >= 10]
    pairs.append((sum(observed[c] for c in small), sum(expected[c] for c in small)))
    pairs = [pair for pair in pairs if pair[1] > 0]
    statistic = sum((seen - count) ** 2 / count for seen, count in pairs)
    return float(scipy.stats.chi2.sf(statistic, len(pairs) - 1))


def sample(drafter, sampler, logits_filter: str, rows: int = ROWS):
    generator = SpeculativeGenerator(tiny(TARGET), drafter, sampler)
    return generator.generate(
        torch.tensor([PROMPT]).expand(rows, -1),
        max_new_tokens=NUM_NEW,
        do_sample=True,
        seed=list(range(rows)),
        trace=True,
        **FILTERS[logits_filter][0],
    )


def p_values_of_texts(result, logits_filter: str) -> dict[int, float]:
    texts = [tuple(text) for text in result.new_tokens.tolist()]
    return {
        n: p_value(Counter(text[:n] for text in texts), text_law(logits_filter, n))
        for n in (1, 2, 3)
    }


def p_values_of_model(generator: SpeculativeGenerator, rows: int) -> Iterator[float]:
    """For texts of one, two and three tokens at temperature 1, over HF's own forwards."""
    table, model = {}, generator.target.model
    for length in range(3):
        ends = list(itertools.product(range(VOCAB), repeat=length))
        ids = torch.tensor([[*PROMPT, *end] for end in ends])
        with torch.no_grad():
            probs = model(input_ids=ids, use_cache=False).logits[:, -1].double().softmax(dim=-1)
        table |= dict(zip(ends, probs.tolist(), strict=True))
    prompts = torch.tensor([PROMPT]).expand(rows, -1)
    options = {"do_sample": True, "top_k": 0, "seed": list(range(rows)), "max_new_tokens": 3}
    result = generator.generate(prompts, **options)
    assert 0.1 < result.stats.acceptance_rate < 0.95
    texts, laws = [tuple(text) for text in result.new_tokens.tolist()], {(): 1.0}
    for length in (1, 2, 3):
        laws = {(*e, x): p * q for e, p in laws.items() for x, q in enumerate(table[e])}
        yield p_value(Counter(text[:length] for text in texts), laws)
