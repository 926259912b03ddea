"""Block heads of a reduced vocabulary as SpecForge writes them in 2026: `draft_vocab_size` at the
top, `t2d` and `d2t` beside tables of so many rows.
"""

import pytest
import torch
from architectures import VOCAB
from checkpoint_files import DRAFT_VOCAB, HIDDEN, tiny_llama, vocab_map
from checkpoint_layouts import domino, markov_shapes, z_lab

from specdec import MaskTokenDrafter, SpeculativeGenerator

TARGET = tiny_llama()
PROMPTS = torch.tensor([[5, 6, 7, 8], [9, 3, 2, 11]])
SETS = [None, [*range(7, 27)], [*range(40, 20, -1)]]  # ascending, shifted, by frequency


def dspark(ids, **keys):
    """SpecForge's configs/qwen3-8b-dspark.json, with `draft_vocab_size`."""
    flash = {"projector_type": "dspark", "attention_mode": "gqa", "markov_rank": 4}
    flash |= {"markov_head_type": "vanilla", "enable_confidence_head": True}
    flash |= {"confidence_head_with_markov": True, "confidence_head_alpha": 1.0}
    files = z_lab(dflash=flash, draft_vocab_size=DRAFT_VOCAB).but(
        architectures=["DSparkDraftModel"], auto_map={"AutoModel": "dspark.DSparkDraftModel"}
    )
    shapes = markov_shapes(4, ids=DRAFT_VOCAB, confidence=HIDDEN + 4)
    files = files.plus({**shapes, "lm_head.weight": (DRAFT_VOCAB, HIDDEN)}).but(**keys)
    files.tensors.update(vocab_map(ids))
    return files


def dflash(ids, **keys):
    files = z_lab(draft_vocab_size=DRAFT_VOCAB).plus({"lm_head.weight": (DRAFT_VOCAB, HIDDEN)})
    files = files.but(**keys)
    files.tensors.update(vocab_map(ids))
    return files


@pytest.mark.parametrize("make", [dspark, dflash])
@pytest.mark.parametrize("ids", SETS, ids=["ascending", "shifted", "by frequency"])
def test_a_block_head_of_fewer_ids_proposes_these_and_no_others(make, ids, tmp_path):
    files = make(ids)
    drafter = MaskTokenDrafter.from_pretrained(files.write(tmp_path), TARGET, num_draft_tokens=4)
    head, own = drafter.head, vocab_map(ids)
    expected = torch.arange(DRAFT_VOCAB) + own["d2t"]
    assert head.target_ids.equal(expected)
    assert head.lm_head.weight.equal(files.tensors["lm_head.weight"])
    if make is dspark:
        markov = files.tensors["markov_head.markov_w2.weight"]
        assert head.correction.markov_w2.weight.equal(markov)
    options = {"max_new_tokens": 12, "trace": True}
    generator = SpeculativeGenerator(TARGET, drafter)
    result = generator.generate(PROMPTS, do_sample=False, **options)
    plain = SpeculativeGenerator(TARGET, None).generate(PROMPTS, max_new_tokens=12)
    assert result.sequences.equal(plain.sequences)
    sampled = generator.generate(PROMPTS, temperature=1.0, seed=[1, 2], **options)
    for trace in (result.trace, sampled.trace):
        drafted = {token for row in trace for step in row for token in step.draft_tokens}
        assert drafted
        assert drafted <= {*expected.tolist()}


def test_what_does_not_fit_the_reduced_vocabulary_is_refused_in_words(tmp_path):
    cases = {
        "must come with d2t or t2d|d2t": dspark(None).but("d2t", "t2d"),
        "lm_head.weight": dspark(None, draft_vocab_size=DRAFT_VOCAB - 1),
        "more than the vocabulary's": dspark(None, draft_vocab_size=VOCAB + 1),
    }
    for n, (message, files) in enumerate(cases.items()):
        with pytest.raises(ValueError, match=message):
            MaskTokenDrafter.from_pretrained(files.write(tmp_path / str(n)), TARGET)


def test_a_block_head_that_names_no_draft_vocabulary_has_the_whole_one(tmp_path):
    for n, files in enumerate((domino(), z_lab(draft_vocab_size=None))):
        folder = files.write(tmp_path / str(n))
        assert MaskTokenDrafter.from_pretrained(folder, TARGET).head.target_ids is None
