"""`GrammarProcessor` gives the text that the same mask gives in plain decoding.

The oracle is HF's own `generate`, with a processor that reads the whole text anew at every token,
or with the grammar library's own HF processor.
"""

import pytest
import torch
from architectures import VOCAB, build
from drafting import ConstantDrafter, perturbed, ragged_prompts, to_right_padding
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import LETTERS
from transformers import LogitsProcessor, LogitsProcessorList

from specdec import CouplingSampler, GrammarProcessor, ModelDrafter, SpeculativeGenerator

MODEL = build("llama")
DRAFTERS = {
    "perturbed": ModelDrafter(perturbed(MODEL), 4),
    "target": ModelDrafter(MODEL, 4),
    "lookup": "lookup",
    "constant": ConstantDrafter(11),  # in the grammar and wrong
}
IDS, MASK = ragged_prompts(VOCAB, 3, 9, 6)
WIDTH = IDS.shape[1]
OPEN, CLOSE, EOS = 11, 22, VOCAB - 1
OPTIONS = {"max_new_tokens": 24, "eos_token_id": EOS, "pad_token_id": 0}


def allowed(text: list[int], row: int = 0) -> set[int]:
    """Brackets that are closed before the end, and odd and even ids in turn; rows begin apart."""
    depth = text.count(OPEN) - text.count(CLOSE)
    if not text:
        return {OPEN}
    if depth == 0:
        return {EOS}
    return {OPEN, CLOSE, *range(30 + (row + len(text)) % 2, 50, 2)}


class Brackets:
    """A matcher of `allowed`, as strict as those of libraries about the order of calls."""

    def __init__(self, row: int = 0):
        self.text, self.row = [], row

    def accept_token(self, token):
        assert not self.is_terminated()
        is_allowed = token in allowed(self.text, self.row)
        self.text += [token] * is_allowed
        return is_allowed

    def rollback(self, num_tokens):
        assert 0 < num_tokens <= len(self.text)
        del self.text[-num_tokens:]

    def is_terminated(self):
        return EOS in self.text

    def fill_next_token_bitmask(self, bitmask, index):
        assert not self.is_terminated()
        bits = [0] * (32 * bitmask.shape[1])
        for token in allowed(self.text, self.row):
            bits[token] = 1
        words = torch.tensor(bits).view(-1, 32) << torch.arange(32)
        bitmask[index] = words.sum(dim=1).to(torch.int32)


class FromScratch(LogitsProcessor):
    """The grammar of every row, read from its whole text."""

    def __call__(self, input_ids, scores):
        masked = torch.full_like(scores, -torch.inf)
        for row, text in enumerate(input_ids[:, WIDTH:].tolist()):
            if EOS not in text:
                ids = list(allowed(text, row))
                masked[row, ids] = scores[row, ids]
        return masked


def plain(processor, **options):
    """HF's own text of the batch."""
    processors = LogitsProcessorList([processor])
    options = OPTIONS | {"attention_mask": MASK, "logits_processor": processors} | options
    return MODEL.generate(IDS, do_sample=False, **options)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_text_in_a_grammar_is_that_of_plain_decoding(drafter):
    generator = SpeculativeGenerator(MODEL, DRAFTERS[drafter])
    result = generator.generate(IDS, MASK, **OPTIONS, logits_processor=[GrammarProcessor(Brackets)])
    assert torch.equal(result.sequences, plain(FromScratch()))
    assert sum(result.stats.accepted) < sum(result.stats.drafted)


def test_one_processor_serves_calls_of_any_kind():
    expected, processor = plain(FromScratch()), GrammarProcessor(Brackets)
    generator = SpeculativeGenerator(MODEL, DRAFTERS["perturbed"])
    for inputs in ((IDS, MASK), to_right_padding(IDS, MASK)):
        result = generator.generate(*inputs, **OPTIONS, logits_processor=[processor])
        assert result.new_tokens.tolist() == expected[:, WIDTH:].tolist()
    assert torch.equal(plain(processor, custom_generate=generator), expected)


def test_sampled_text_in_a_grammar_does_not_depend_on_the_drafter():
    options = OPTIONS | {"do_sample": True, "seed": [1, 2, 3], "top_k": 0}
    options["logits_processor"] = [GrammarProcessor(Brackets)]
    expected, found = (
        SpeculativeGenerator(MODEL, drafter, CouplingSampler()).generate(IDS, MASK, **options)
        for drafter in (None, DRAFTERS["perturbed"])
    )
    assert torch.equal(found.sequences, expected.sequences)
    assert found.stats.acceptance_length > 1
    for row, text in enumerate(found.new_tokens.tolist()):
        for end in range(found.lengths[row]):
            assert text[end] in allowed(text[:end], row)


@given(st.lists(st.lists(st.sampled_from([OPEN, CLOSE, 30, 31, 32, 60]), max_size=6), max_size=9))
@settings(max_examples=60, deadline=None)
def test_scores_depend_on_the_tokens_alone_in_any_order_of_calls(texts):
    prompt, scores = torch.tensor([[5, 6]]), torch.randn(1, VOCAB)
    processor = GrammarProcessor(Brackets).start(prompt)
    for text in [*texts, *texts[::-1]]:
        ids = torch.cat([prompt, torch.tensor([text], dtype=torch.long)], dim=1)
        fresh = GrammarProcessor(Brackets).start(prompt)
        assert torch.equal(processor(ids, scores), fresh(ids, scores))
        if all(token in allowed(text[:end]) for end, token in enumerate(text)) and EOS not in text:
            is_kept = fresh(ids, scores).isfinite()[0].nonzero().flatten().tolist()
            assert set(is_kept) == allowed(text)


def test_a_grammar_processor_outside_of_a_generator_says_where_it_runs():
    with pytest.raises(ValueError, match=r"runs in a generator of specdec.*library's own"):
        plain(GrammarProcessor(Brackets))


def test_xgrammars_matcher_gives_the_text_of_its_own_processor_in_hf():
    xgrammar = pytest.importorskip("xgrammar")
    own = pytest.importorskip("xgrammar.contrib.hf")
    kind = xgrammar.VocabType.RAW
    info = xgrammar.TokenizerInfo(LETTERS, kind, vocab_size=VOCAB, stop_token_ids=[EOS])
    rules = 'root ::= "(" item ("," item)* ")"\nitem ::= [0-9A-Z]{1,3} | root\n'
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(rules)
    expected = plain(own.LogitsProcessor(compiled))
    generator = SpeculativeGenerator(MODEL, DRAFTERS["perturbed"])
    processor = GrammarProcessor(lambda row: xgrammar.GrammarMatcher(compiled))
    result = generator.generate(IDS, MASK, **OPTIONS, logits_processor=[processor])
    assert torch.equal(result.sequences, expected)
    assert result.stats.acceptance_length > 1
    assert torch.equal(plain(processor, custom_generate=generator), expected)
    with pytest.raises(ValueError, match=r"may keep state.*specdec\.GrammarProcessor"):
        generator.generate(IDS, MASK, logits_processor=[own.LogitsProcessor(compiled)])
