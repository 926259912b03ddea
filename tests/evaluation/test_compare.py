"""Whole ways of decoding against each other: Hugging Face's `generate` and our generators, in turn
on the same batches.
"""

import numpy as np
import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts

from specdec import ModelDrafter, PromptLookupDrafter, SpeculativeGenerator, evaluate
from specdec.lab.evaluation import Evaluation, HFGenerate, Study, compare
from specdec.lab.evaluation.run_file import EvaluatedBatch

TARGET = build("llama")
DRAFT = perturbed(TARGET)
IDS, MASK = ragged_prompts(VOCAB, 3, 7, 5, 4, 6, 2)
SHORT = {"rounds": 1, "max_new_tokens": 12}


def timed(run: Evaluation, seconds: np.ndarray) -> Evaluation:
    """A run that took so long for its batches."""
    batches = [
        EvaluatedBatch(b.index, [float(s)], b.rows)
        for b, s in zip(run.batches, seconds, strict=True)
    ]
    return Evaluation(batches, run.num_draft_tokens, run.about)


def made_up(**speeds: float) -> Study:
    """Texts of one run, at so many tokens per second on a machine that drifts."""
    rng = np.random.default_rng(0)
    prompts = [[1 + i % 7] * (2 + i % 3) for i in range(20)]
    run = evaluate(SpeculativeGenerator(TARGET, None), prompts, max_new_tokens=6)
    drift = 1 + 0.5 * np.linspace(0, 1, 20)
    runs = [timed(run, 6 / s * drift * rng.lognormal(0, 0.02, 20)) for s in speeds.values()]
    cells = [{"drafter": name, "draft": 0, "temperature": 0.0} for name in speeds]
    return Study(cells, runs, timed=True)


def test_ratios_of_made_up_times_are_in_their_intervals_and_narrow():
    study = made_up(plain=100.0, fast=180.0, same=100.5)
    plain, fast, same = ({"drafter": name} for name in ("plain", "fast", "same"))
    found = study.ratio(plain, fast)
    assert found.covers(1.8)
    assert found.high - found.low < 0.1
    assert study.ratio(fast, plain).covers(1 / 1.8)
    assert study.ratio(plain, same).covers(1.0)
    assert study.difference(plain, fast, "ms_per_token").high < 0
    (table,) = study.tables()
    assert [row[0] for row in table.rows] == ["plain", "fast", "same"]
    assert table.rows[0][3].startswith("1.00")
    assert table.rows[1][3] == format(found, ".2f")
    assert table.notes[0].startswith("Speed-up over plain;")
    assert [c["drafter"] for c in study.best().cells] == ["fast"]


def test_generators_and_hugging_face_write_the_same_greedy_text():
    ways = {
        "HF generate": HFGenerate(TARGET),
        "HF assisted": HFGenerate(TARGET, DRAFT, num_assistant_tokens=3),
        "specdec": SpeculativeGenerator(TARGET, ModelDrafter(DRAFT, 3)),
        "plain": SpeculativeGenerator(TARGET, None),
    }
    before = DRAFT.generation_config.to_dict()
    study = compare(ways, IDS, MASK, **SHORT)
    assert DRAFT.generation_config.to_dict() == before
    texts = [[row.new_tokens for row in run.rows] for run in study.runs]
    assert all(text == texts[0] for text in texts)
    assert not any("differs" in note for note in study.tables()[0].notes)
    found = study.test({"drafter": "HF generate"}, of="ms_per_token")  # of other draft sizes, too
    assert [test.cell["drafter"] for test in found.tests] == ["HF assisted", "specdec", "plain"]
    unknown = study.test({"drafter": "HF generate"}, {"drafter": "HF assisted"}).tests[0]
    assert (unknown.p_value, np.isnan(unknown.difference.value)) == (1.0, True)
    lengths = {r["drafter"]: r["acceptance_length"] for r in study.records()}
    assert lengths["HF generate"] == lengths["plain"] == 1
    assert np.isnan(lengths["HF assisted"])  # not known
    (rates,) = study.tables(of="acceptance_rate")
    assert ["not known" in " ".join(row) for row in rates.rows][1]
    alone = [
        ways["specdec"].generate(row[mask.bool()][None], max_new_tokens=12)
        for row, mask in zip(IDS, MASK, strict=True)
    ]
    accepted = study.runs[2].stats.accepted
    assert accepted == [result.stats.accepted[0] for result in alone]


def test_greedy_text_that_is_another_one_is_noted():
    other = perturbed(TARGET, scale=2.0)
    ways = {"plain": SpeculativeGenerator(TARGET, None), "other": SpeculativeGenerator(other, None)}
    assert (
        "Greedy text differs from that of plain: other."
        in compare(ways, IDS, MASK, **SHORT).tables()[0].notes
    )
    sampled = compare(ways, IDS, MASK, temperature=1.0, **SHORT).tables()[0]
    assert not any("differs" in note for note in sampled.notes)


def test_sampled_text_of_hugging_face_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    ways = {"HF": HFGenerate(TARGET), "specdec": SpeculativeGenerator(TARGET, None)}
    compare(ways, IDS, MASK, rounds=1, max_new_tokens=4, temperature=1.0)
    assert torch.rand(2).tolist() == expected


def test_hugging_face_samples_from_all_ids_as_specdec_does(monkeypatch):
    kept, draw = [], torch.multinomial

    def counting(probs, num_samples):
        kept.append((probs > 0).sum(dim=-1).min().item())
        return draw(probs, num_samples)

    monkeypatch.setattr(torch, "multinomial", counting)
    evaluate(HFGenerate(TARGET), [[1, 2, 3], [4, 5]], max_new_tokens=3, temperature=1.0)
    assert set(kept) == {VOCAB}
    assert VOCAB > 50  # HF's default top_k


def test_rows_that_end_lose_their_padding():
    end = evaluate(HFGenerate(TARGET), [[1, 2, 3]], max_new_tokens=4).rows[0].new_tokens[1]
    options = {"max_new_tokens": 6, "eos_token_id": end, "pad_token_id": 0, "batch_size": 2}
    rows = evaluate(HFGenerate(TARGET), [[1, 2, 3], [5, 6]], **options).rows
    assert rows[0].new_tokens[-1] == end
    assert rows[0].finish_reason == "eos"
    assert len(rows[0].new_tokens) == 2


REFUSED = [
    ({"a": SpeculativeGenerator(TARGET, None)}, "nothing to compare"),
    ({"a": TARGET, "b": TARGET}, r"must be a SpeculativeGenerator or HFGenerate\(model\)"),
    ({"a": PromptLookupDrafter(2), "b": TARGET}, "contender 'a' must be"),
]


@pytest.mark.parametrize(("ways", "why"), REFUSED)
def test_what_is_no_way_of_decoding_is_refused(ways, why):
    with pytest.raises((TypeError, ValueError), match=why):
        compare(ways, IDS, MASK)
