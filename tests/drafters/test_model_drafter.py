"""`ModelDrafter`: probabilities are those of a forward without cache, tokens are their draws; the
end of the draft model's positions, and vocabularies of another size. Laws that all drafters share
are in `test_laws.py`.

The oracle runs the draft model without any cache over a row's committed and drafted tokens. The
text arrives as in the loop: prefill in chunks, then blocks of an accepted prefix and one new token.
"""

import copy

import pytest
import torch
from architectures import VOCAB, build
from drafter_table import drive
from drafting import drawing
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loop import PlainLoop

from specdec import ModelDrafter, SpeculativeGenerator
from specdec.kernels import draw
from specdec.samplers import Noise, Stream, Warp

CPU = torch.device("cpu")
ATTENTION = "llama", "mistral_sliding", "gpt_oss", "gpt2", "mpt"
MODELS = {name: build(name) for name in (*ATTENTION, "qwen3_5", "bamba", "mamba")}
GATES = {
    "plain": {},
    "warped": {"temperature": 0.7, "top_k": 12, "top_p": 0.9},
    "greedy": {"temperature": 0},
}
seeds = st.integers(0, 2**32 - 1)


def plain_laws(model, text, drafted, warp_of_row, vocab_size=VOCAB):
    """`[K, vocab_size]`: the law behind the text and each drafted prefix, without any cache."""
    tokens = torch.tensor([text + drafted[:-1]]).clamp(max=model.config.vocab_size - 1)
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(text) - 1 :, :vocab_size]
    missing = logits.new_full((len(logits), vocab_size - logits.shape[-1]), -torch.inf)
    return warp_of_row(torch.cat([logits, missing], dim=-1)[None])[0]


def check(draft, loop, model, gate, uniforms, vocab_size=VOCAB):
    """Every valid law is the oracle's, and every valid token is the draw of its law."""
    num_valid = [draft.tokens.shape[1]] * len(loop.rows)
    if draft.num_valid is not None:
        num_valid = draft.num_valid.tolist()
    for b, (text, count) in enumerate(zip(loop.rows, num_valid, strict=True)):
        if count == 0:
            continue
        drafted = draft.tokens[b, :count].tolist()
        laws = plain_laws(model, text, drafted, Warp(1, **gate), vocab_size)
        if draft.probs is None:
            assert gate == GATES["greedy"]
            assert drafted == laws.argmax(-1).tolist()
            continue
        torch.testing.assert_close(draft.probs[b, :count], laws, rtol=0, atol=1e-5)
        assert drafted == draw(draft.probs[b, :count], uniforms[b, :count]).tolist()
    return num_valid


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=6)
@given(seeds, st.sampled_from(list(GATES.values())), st.integers(1, 4), st.integers(1, 9))
@torch.no_grad()
def test_a_proposal_from_its_state_is_that_of_a_forward_without_cache(
    name, seed, gate, width, chunk_size
):
    drafter = ModelDrafter(MODELS[name], num_draft_tokens=width)
    options = {"chunk_size": chunk_size, "warp": gate, "num_steps": 3}
    for loop, draft, noise in drive(drafter, seed, vocab_size=VOCAB, **options):
        check(draft, loop, MODELS[name], gate, noise.uniform(Stream.PROPOSE))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bamba"])
@torch.no_grad()
def test_fewer_tokens_are_valid_where_the_positions_of_the_draft_model_end(name):
    limit, width, gate = 16, 4, GATES["plain"]
    config = copy.deepcopy(MODELS[name].config)
    config.max_position_embeddings = limit
    model = type(MODELS[name])(config).eval()
    drafter = ModelDrafter(model, num_draft_tokens=width)
    lengths = [9, 13, 14, 15, 16, 17, 20]
    prompts = [[(7 * i + n) % VOCAB for i in range(n)] for n in lengths]
    state = drafter.init_state(len(lengths), 30, vocab_size=VOCAB, device=CPU)
    loop = PlainLoop(prompts, width)
    loop.prefill(drafter, state, 6)
    step = Noise(list(range(len(lengths)))).at(torch.tensor(lengths), width + 1)
    draft = drafter.propose(loop.context(), state, drawing(drafter, Warp(len(lengths)), step))
    num_valid = check(draft, loop, model, gate, step.uniform(Stream.PROPOSE))
    assert num_valid == [min(max(limit - (n - 1), 0), width) for n in lengths]
    assert num_valid == [4, 4, 3, 2, 1, 0, 0]


def test_a_model_that_was_cast_needs_another_drafter_as_the_error_says():
    model, target, prompt = build("llama", seed=4), MODELS["llama"], torch.tensor([[1, 2, 3]])
    generator = SpeculativeGenerator(target, ModelDrafter(model, 2))
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16 now; make the ModelDrafter and its generator"):
        generator.generate(prompt, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"bfloat16 now; make the ModelDrafter and its generator"):
        SpeculativeGenerator(target, generator.drafter)
    again = SpeculativeGenerator(target, ModelDrafter(model, 2))
    assert again.generate(prompt, max_new_tokens=4, eos_token_id=None).new_tokens.shape == (1, 4)


@pytest.mark.parametrize("vocab_size", [VOCAB - 6, VOCAB + 6])
@pytest.mark.parametrize("gate", [GATES["plain"], GATES["greedy"]], ids=str)
@torch.no_grad()
def test_laws_are_over_the_vocabulary_of_the_target(vocab_size, gate):
    model = MODELS["llama"]
    drafter = ModelDrafter(model, num_draft_tokens=3)
    state = drafter.init_state(2, 30, vocab_size=vocab_size, device=CPU)
    loop = PlainLoop([[3, vocab_size - 1, 4], [vocab_size - 1]], 3)
    loop.prefill(drafter, state, 2)
    step = Noise([0, 1]).at(torch.tensor([2, 0]), 4)
    draft = drafter.propose(loop.context(), state, drawing(drafter, Warp(2, **gate), step))
    check(draft, loop, model, gate, step.uniform(Stream.PROPOSE), vocab_size)
    assert draft.tokens.max() < min(vocab_size, VOCAB)
    if draft.probs is not None:
        assert draft.probs.shape == (2, 3, vocab_size)
        assert not bool(draft.probs[..., VOCAB:].any())
