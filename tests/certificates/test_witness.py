"""Greedy and coupled text is held against HF's own forward of the model, not against ours."""

from dataclasses import replace

import pytest
import torch
from test_certify_runs import WrongTarget, drafter
from test_impossible import model
from text_laws import DRAFT, PROMPT, TARGET, VOCAB, tiny

from specdec import CouplingSampler, PromptLookupDrafter, SpeculativeGenerator, Target
from specdec.lab.certificates.generator.reading import witness_of
from specdec.lab.certificates.generator.text import audit_text
from specdec.lab.certificates.generator.witness import MAX_ROUNDING, RowText, moved
from specdec.request import Sampling


@pytest.mark.parametrize(("sampler", "sampling"), [("auto", None), ("coupling", Sampling(top_k=4))])
def test_a_target_that_is_wrong_alike_with_and_without_drafts_fails(sampler, sampling):
    """Plain decoding through the same target has the same texts."""
    wrong = WrongTarget(tiny(TARGET))
    found = audit_text(SpeculativeGenerator(wrong, drafter(), sampler), [PROMPT], 20, sampling)
    assert not found.passed
    assert "Hugging Face's own forward has" in str(found)
    sound = SpeculativeGenerator(tiny(TARGET), drafter(), sampler)
    found = audit_text(sound, [PROMPT], 20, sampling)
    assert found.passed
    assert found.num_tokens == 20


def test_every_token_is_judged_after_the_tokens_before_it():
    """A text that parts from HF's is not given up there: all of it is looked at."""

    class OnceWrong(Target):
        """In one step alone."""

        calls = 0

        def verify(self, *args, **options):
            output = super().verify(*args, **options)
            type(self).calls += 1
            return replace(output, logits=-output.logits) if self.calls == 3 else output

    found = audit_text(SpeculativeGenerator(OnceWrong(tiny(TARGET)), None), [PROMPT], 20)
    assert [difference.place for difference in found.differences] == [2]
    assert found.num_tokens == 19 + 20  # and those of a text beside a sampled row


def text_of(one, num=24):
    """A text of random tokens."""
    ids = torch.randint(one.config.vocab_size, (num,), generator=torch.Generator().manual_seed(0))
    return RowText(ids.tolist(), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_the_data_type(dtype):
    own = witness_of(SpeculativeGenerator(model(dtype), None))
    text = text_of(model(dtype))
    whole = own.logits(text)
    last_bit = torch.finfo(dtype).eps * whole.abs().max().item()
    off = (whole - own.in_pieces(text)).abs().max().item()
    assert whole.shape == (20, 300)
    assert last_bit <= own.rounding(text, whole) <= MAX_ROUNDING * last_bit
    assert own.rounding(text, whole) >= 2 * min(off, last_bit)


def test_a_model_that_depends_on_how_a_call_is_cut_excuses_no_more_than_its_data_type():
    one = tiny(DRAFT)
    text = text_of(one)

    def steer(layer, inputs, output):
        output[:, -1] += 5.0  # of the last token of each call

    with one.model.layers[0].mlp.register_forward_hook(steer):
        own = witness_of(_Plain()(one))
        whole = own.logits(text)
        assert (whole - own.in_pieces(text)).abs().max() > 0.01
        assert own.rounding(text, whole) < 1e-4


class _Plain:
    """So much of a generator as a witness needs."""

    def __call__(self, one):
        self.target = type(
            "T", (), {"model": one, "vocab_size": VOCAB, "is_recurrent": False, "edits": ()}
        )
        return self


def test_a_tie_needs_both_tokens_within_rounding_of_the_top():
    logits = torch.tensor([2.0, 1.9999, 0.8, -3.0])
    assert moved(logits, 1, 1e-4).argmax() == 1
    assert moved(logits, 1, 1e-6).argmax() == 0
    assert moved(logits, 2, 1e-4).argmax() != 2
    equal = torch.tensor([1.0, 1.0])
    assert [int(moved(equal, token, 1e-6).argmax()) for token in (0, 1)] == [0, 1]


def test_half_precision_passes_and_counts_its_ties():
    one = SpeculativeGenerator(model(torch.bfloat16), PromptLookupDrafter(3))
    prompts = [[7, 8, 9, 7, 8], [3], [5, 100, 2]]
    for sampler, sampling in (("auto", None), (CouplingSampler(), Sampling(top_p=0.9))):
        one = SpeculativeGenerator(one.target, one.drafter, sampler)
        found = audit_text(one, prompts, 40, sampling)
        assert found.passed, found
        assert found.num_tokens + found.num_ties == 120


def test_a_text_ends_where_hf_ends_it(monkeypatch):
    one = tiny(TARGET)
    plain = SpeculativeGenerator(one, None)
    text = plain.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False).texts[0]
    end = text[5]
    monkeypatch.setattr(one.generation_config, "eos_token_id", end)
    found = audit_text(SpeculativeGenerator(one, drafter()), [PROMPT], 12)
    assert found.passed
    assert found.num_tokens == text.index(end) + 1

    generator = SpeculativeGenerator(one, drafter())
    real = generator.generate
    for ends, says in (([], "goes on there"), (list(range(VOCAB)), "ends there")):
        monkeypatch.setattr(
            generator, "generate", lambda *a, ends=ends, **o: real(*a, **o, eos_token_id=ends)
        )
        found = audit_text(generator, [PROMPT], 12)
        assert not found.passed or text.index(end) == 0
        assert f"speculation {says}" in str(found)
