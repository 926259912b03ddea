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
from diagonal import first
from drafter_table import drive, fresh_state, loop_of, propose
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import ModelDrafter
from specdec.kernels import draw
from specdec.samplers import LogitsFilter, Stream

ATTENTION = "llama", "mistral_sliding", "gpt_oss", "gpt2", "mpt"
MODELS = {name: build(name) for name in (*ATTENTION, "qwen3_5", "bamba", "mamba")}
PLAIN, GREEDY = {}, {"temperature": 0}
FILTERS = [PLAIN, {"temperature": 0.7, "top_k": 12, "top_p": 0.9}, GREEDY]


def check(draft, noise, loop, model, logits_filter, vocab_size=VOCAB):
    """Every valid distribution is the oracle's, and every valid token is drawn from its own."""
    uniforms, num_valid = noise.uniform(Stream.PROPOSE), [draft.tokens.shape[1]] * len(loop.rows)
    if draft.num_valid is not None:
        num_valid = draft.num_valid.tolist()
    for b, (text, count) in enumerate(zip(loop.rows, num_valid, strict=True)):
        if count == 0:
            continue
        drafted = draft.tokens[b, :count].tolist()
        tokens = torch.tensor([text + drafted[:-1]]).clamp(max=VOCAB - 1)
        logits = model(input_ids=tokens, use_cache=False).logits[:, len(text) - 1 :, :vocab_size]
        missing = logits.new_full((1, count, max(vocab_size - VOCAB, 0)), -torch.inf)
        expected = LogitsFilter(1, **logits_filter)(torch.cat([logits, missing], dim=-1))[0]
        if draft.probs is None:
            assert logits_filter == GREEDY
            assert drafted == expected.argmax(-1).tolist()
            continue
        torch.testing.assert_close(draft.probs[b, :count], expected, rtol=0, atol=1e-5)
        assert drafted == draw(draft.probs[b, :count], uniforms[b, :count]).tolist()
    return num_valid


@pytest.mark.parametrize("name", first(MODELS, [*ATTENTION, "bamba"]))
@settings(max_examples=3)
@given(st.integers(0, 2**32 - 1), st.sampled_from(FILTERS), st.integers(1, 4), st.integers(1, 9))
@torch.no_grad()
def test_a_proposal_from_its_state_is_that_of_a_forward_without_cache(
    name, seed, logits_filter, width, chunk_size
):
    drafter = ModelDrafter(MODELS[name], num_draft_tokens=width)
    options = {"chunk_size": chunk_size, "logits_filter": logits_filter, "num_steps": 3}
    for loop, draft, noise in drive(drafter, seed, vocab_size=VOCAB, **options):
        check(draft, noise, loop, MODELS[name], logits_filter)


def proposed(drafter, prompts, logits_filter, vocab_size=VOCAB):
    """The first draft after some texts, and its noise."""
    loop, state = loop_of(drafter, prompts), fresh_state(drafter, len(prompts), vocab_size)
    loop.prefill(drafter, state, 6)
    return *propose(drafter, loop, state, logits_filter), loop


@pytest.mark.parametrize("name", ["llama", "gpt2", "bamba"])
@torch.no_grad()
def test_fewer_tokens_are_valid_where_the_positions_of_the_draft_model_end(name):
    limit, config = 16, copy.deepcopy(MODELS[name].config)
    config.max_position_embeddings = limit
    model, lengths = type(MODELS[name])(config).eval(), [9, 13, 14, 15, 16, 17, 20]
    prompts = [[(7 * i + n) % VOCAB for i in range(n)] for n in lengths]
    num_valid = check(*proposed(ModelDrafter(model, 4), prompts, PLAIN), model, PLAIN)
    assert num_valid == [min(max(limit - (n - 1), 0), 4) for n in lengths] == [4, 4, 3, 2, 1, 0, 0]


@pytest.mark.parametrize("vocab_size", [VOCAB - 6, VOCAB + 6])
@pytest.mark.parametrize("logits_filter", [PLAIN, GREEDY], ids=str)
@torch.no_grad()
def test_distributions_are_over_the_vocabulary_of_the_target(vocab_size, logits_filter):
    drafter, texts = ModelDrafter(MODELS["llama"], 3), [[3, vocab_size - 1, 4], [vocab_size - 1]]
    draft, *rest = proposed(drafter, texts, logits_filter, vocab_size)
    check(draft, *rest, MODELS["llama"], logits_filter, vocab_size)
    assert draft.tokens.max() < min(vocab_size, VOCAB)
    if draft.probs is not None:
        assert draft.probs.shape == (2, 3, vocab_size)
        assert not bool(draft.probs[..., VOCAB:].any())
