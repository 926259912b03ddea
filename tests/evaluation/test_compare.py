"""A comparison gives every contender the same tasks in turn, and its ratios are those of the times.

Times are made up where a number is checked, so that nothing depends on the machine.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts

from specdec import ModelDrafter, SpeculativeGenerator
from specdec.evaluation import Answer, Comparison, HFGenerate, compare

TARGET = build("llama")
DRAFT = perturbed(TARGET)
IDS, MASK = ragged_prompts(VOCAB, 3, 7, 5, 4)


class Recorder:
    """Notes who was asked what, and answers with a token of its own."""

    def __init__(self, name: str, log: list):
        self.name, self.log = name, log

    def __call__(self, task) -> Answer:
        self.log.append((self.name, task.seeds[0]))
        return Answer([[len(self.name)] * task.max_new_tokens for _ in task.seeds])


def made_up(speeds: dict[str, float], *, noise: float = 0.05, batches: int = 20) -> Comparison:
    """Batches that differ in length, and rounds that drift."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(50, 200, batches)
    drift = 1 + 0.5 * np.linspace(0, 1, 5)  # of the machine, which meets all of them
    seconds = {
        name: tokens[:, None] / speed * drift * rng.lognormal(0, noise, (batches, 5))
        for name, speed in speeds.items()
    }
    return Comparison(
        seconds,
        dict.fromkeys(speeds, tokens),
        dict.fromkeys(speeds),
        next(iter(speeds)),
        dict.fromkeys(speeds, True),
    )


def test_ratios_of_made_up_times_are_in_their_intervals_and_narrow():
    comparison = made_up({"plain": 100.0, "fast": 180.0, "same": 100.5})
    fast, same = comparison.ratio("fast"), comparison.ratio("same")
    assert fast.covers(1.8)
    assert fast.high - fast.low < 0.15
    assert same.covers(1.0)
    assert comparison.ratio("fast", "same").covers(180 / 100.5)
    assert comparison.ratio("plain", "fast").covers(1 / 1.8)
    notes = " ".join(comparison.notes())
    assert "No difference from plain is shown (the interval includes 1): same." in notes
    assert "plain" in str(comparison)


def test_contenders_that_the_rounds_tell_apart_are_noted_with_their_ratio():
    """Batches differ by more than the contenders do, so only the ratio within rounds shows it."""
    comparison = made_up({"plain": 100.0, "a": 150.0, "b": 156.0}, noise=0.001)
    drift = np.linspace(0.7, 1.3, 20)[:, None]
    for name in ("a", "b"):
        comparison.seconds[name][:] *= drift
    (note,) = comparison.notes()
    assert note.startswith("Intervals overlap, but the ratio within rounds differs from 1: a / b")
    assert str(comparison.ratio("a", "b")) in note


def test_one_slow_round_does_not_count():
    comparison = made_up({"plain": 100.0, "other": 100.0}, noise=0.001)
    comparison.seconds["other"][:, 2] *= 10
    assert comparison.ratio("other").value == pytest.approx(1.0, abs=0.01)
    assert comparison.ratio("other").covers(1.0)


def test_every_contender_gets_every_task_in_every_round_and_who_begins_changes():
    log = []
    ways = {name: Recorder(name, log) for name in ("a", "bb", "ccc")}
    comparison = compare(ways, IDS, MASK, rounds=3, max_new_tokens=2, temperature=1.0, seed=7)
    assert len(log) == 4 * 3 * 4
    rounds = [log[start : start + 12] for start in range(0, 48, 12)]
    for entries in rounds:
        assert {entry for entry in entries} == {(n, 7 + i) for n in ways for i in range(4)}
        triples = [entries[i : i + 3] for i in range(0, 12, 3)]
        assert all(len({seed for _, seed in triple}) == 1 for triple in triples)
    assert [entries[0][0] for entries in rounds] == ["a", "bb", "ccc", "a"]
    assert comparison.seconds["a"].shape == (4, 3)
    assert comparison.tokens["bb"].tolist() == [2] * 4
    assert comparison.equal == {"a": None, "bb": None, "ccc": None}  # sampled
    greedy = compare(ways, IDS, MASK, rounds=1, max_new_tokens=2)
    assert greedy.equal == {"a": True, "bb": False, "ccc": False}
    assert any("Greedy text differs from that of a: bb, ccc." in note for note in greedy.notes())


def test_generators_and_hugging_face_write_the_same_greedy_text():
    ways = {
        "HF generate": HFGenerate(TARGET),
        "HF assisted": HFGenerate(TARGET, DRAFT, num_assistant_tokens=3),
        "specdec": SpeculativeGenerator(TARGET, ModelDrafter(DRAFT, 3)),
        "plain": SpeculativeGenerator(TARGET, None),
    }
    before = DRAFT.generation_config.to_dict()
    comparison = compare(ways, IDS, MASK, rounds=1, max_new_tokens=12)
    assert all(comparison.equal.values())
    assert DRAFT.generation_config.to_dict() == before
    assert comparison.stats["HF generate"] is None
    assert comparison.stats["plain"] is None
    stats = comparison.stats["specdec"]
    assert sum(stats.emitted) == comparison.tokens["specdec"].sum() == 48
    alone = [
        SpeculativeGenerator(TARGET, ModelDrafter(DRAFT, 3)).generate(
            row[mask.bool()][None], max_new_tokens=12
        )
        for row, mask in zip(IDS, MASK, strict=True)
    ]
    assert stats.accepted == [result.stats.accepted[0] for result in alone]


def test_sampled_text_of_hugging_face_leaves_the_global_generator_alone():
    import torch

    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    ways = {"HF": HFGenerate(TARGET), "specdec": SpeculativeGenerator(TARGET, None)}
    compare(ways, IDS, MASK, rounds=1, max_new_tokens=4, temperature=1.0)
    assert torch.rand(2).tolist() == expected


def test_batches_of_several_prompts_and_rows_that_end():
    from specdec.evaluation.compare import _until_end

    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=(5, 6)))
    assert _until_end([1, 2, 6, 0, 0], model) == [1, 2, 6]
    assert _until_end([1, 2, 3], model) == [1, 2, 3]
    log = []
    comparison = compare(
        {"a": Recorder("a", log), "b": Recorder("b", log)}, IDS, MASK, rounds=1, batch_size=3
    )
    assert comparison.tokens["a"].tolist() == [3 * 64, 64]


def test_hugging_face_samples_from_all_ids_as_specdec_does(monkeypatch):
    kept, draw = [], torch.multinomial

    def counting(probs, num_samples):
        kept.append((probs > 0).sum(dim=-1).min().item())
        return draw(probs, num_samples)

    monkeypatch.setattr(torch, "multinomial", counting)
    contenders = {"HF": HFGenerate(TARGET), "plain": SpeculativeGenerator(TARGET, None)}
    options = {"rounds": 1, "max_new_tokens": 3, "temperature": 1.0}
    compare(contenders, [[1, 2, 3], [4, 5]], **options)
    assert set(kept) == {VOCAB}
    assert VOCAB > 50  # HF's default top_k
