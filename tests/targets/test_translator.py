"""A trained translator (`recipes/translator`): whatever drafts, the text is HF's, and drafts are
accepted as often as its page says.
"""

import functools
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import MarianMTModel

from recipes.translator import recipe
from recipes.translator.sentences import END, VOCABULARY, batch, decode, encode, sentence
from specdec import ModelDrafter, PromptLookupDrafter, SpeculativeGenerator, Target

ROOT = Path(__file__).parents[2]
MEASURED = json.loads((recipe.WEIGHTS / "measured.json").read_text())
COUNT = 32


@functools.cache
def translator() -> MarianMTModel:
    return recipe.load(recipe.WEIGHTS / "target")


@functools.cache
def expected():
    """English, its padded ids with their mask, and what HF writes."""
    pairs = [sentence(recipe.HELD_OUT + i) for i in range(COUNT)]
    ids, mask = batch([english for english, _ in pairs])
    options = {"attention_mask": mask, "max_new_tokens": recipe.LONGEST}
    return pairs, ids, mask, translator().generate(ids, **options)


def test_sentences_and_their_translations():
    english, german = sentence(2)
    assert english == "Da Lo finds 2 6 7 black books behind Ti Si on Friday ."
    assert german == "Da Lo findet am Freitag 2 6 7 schwarze Bücher hinter Ti Si ."
    assert decode([*encode(german), 7, 8]) == german
    assert len(VOCABULARY) == len({*VOCABULARY}) == translator().config.vocab_size
    assert VOCABULARY.index(END) == translator().config.eos_token_id


def test_held_out_sentences_are_translated():
    pairs, _, _, text = expected()
    right = [
        decode(row[1:].tolist()) == german for row, (_, german) in zip(text, pairs, strict=True)
    ]
    assert sum(right) >= 0.95 * COUNT
    assert MEASURED["right"] >= 0.95 * MEASURED["sentences"]


DRAFTERS = [*recipe.drafters(recipe.WEIGHTS), "text lookup"]


@pytest.mark.parametrize("name", DRAFTERS)
def test_text_is_that_of_hf_and_acceptance_that_of_the_page(name):
    _, ids, mask, text = expected()
    drafter = recipe.drafters(recipe.WEIGHTS).get(name) or PromptLookupDrafter(4)
    generator = SpeculativeGenerator(Target(translator()), drafter)
    result = generator.generate(ids, mask, max_new_tokens=recipe.LONGEST)
    assert result.sequences.equal(text)
    if name in MEASURED:
        found, low, high = map(float, re.findall(r"\d+\.\d+", MEASURED[name])[:3])
        assert result.stats.acceptance_length == pytest.approx(found, abs=3 * (high - low))
    else:  # nothing of a sentence is in the text before it
        assert result.stats.acceptance_length < 1.1


def test_the_draft_model_has_the_encoder_of_the_target():
    _, ids, mask, text = expected()
    target, draft = translator(), recipe.load(recipe.WEIGHTS / "draft")
    of_draft = draft.get_encoder().state_dict()
    for name, weight in target.get_encoder().state_dict().items():
        assert weight.equal(of_draft[name])
    draft.model.encoder = target.model.encoder
    calls, own = [], target.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    generator = SpeculativeGenerator(Target(target), ModelDrafter(draft, 4))
    calls.clear()
    assert generator.generate(ids, mask, max_new_tokens=recipe.LONGEST).sequences.equal(text)
    own.remove()
    assert len(calls) == 1


def test_sampled_text_is_that_of_plain_decoding_by_coupling():
    _, ids, mask, _ = expected()
    options = {"do_sample": True, "seed": [*range(COUNT)], "max_new_tokens": recipe.LONGEST}
    target, drafters = Target(translator()), recipe.drafters(recipe.WEIGHTS)
    texts = [
        SpeculativeGenerator(target, drafter, "coupling").generate(ids, mask, **options).sequences
        for drafter in (None, drafters["distilled"])
    ]
    assert texts[0].equal(texts[1])


def test_figures_of_the_page_are_those_that_were_measured():
    page = " ".join((ROOT / "docs/encoders.md").read_text(encoding="utf-8").split())
    for name in recipe.drafters(recipe.WEIGHTS):
        figure = re.match(r"\d+\.\d+", MEASURED[name]).group()
        assert f"| {name} | {figure} |" in page
        assert MEASURED[f"{name}: equal"]


@pytest.mark.slow
def test_the_recipe_runs_and_what_it_writes_is_read(tmp_path, capsys):
    recipe.main(["--steps", "2", "--sentences", "4", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "measured.json").read_text())
    assert all(found[f"{name}: equal"] for name in recipe.drafters(tmp_path))
    assert "source lookup" in capsys.readouterr().out
    assert torch.isfinite(recipe.load(tmp_path / "draft").lm_head.weight).all()
