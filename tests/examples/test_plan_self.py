"""How a target drafts for itself is chosen by what was measured."""

import pytest
from architectures import VOCAB, build
from drafting import ragged_prompts

from benchmarks.plan_self import Choice, Texts, choose_layers, main
from specdec import Target
from specdec.drafters.visible import draft_cache
from specdec.lab.evaluation.costs import CostCurve

TARGET = Target(build("gemma3"))
PROMPTS = [ids[-n:].tolist() for ids, n in zip(ragged_prompts(VOCAB, 4, 9)[0], (4, 9), strict=True)]


class Known(Texts):
    """Layers 1 and 4 are not missed, and each layer costs the same: the best set is known."""

    def read(self, generator):
        return generator

    def costs(self, generator, rounds):
        per_token = len(generator.drafter.layers)
        return CostCurve([6.0], {k: [6.0 + k * per_token] for k in range(3)})

    def best(self, what, read, curve):
        missed = {0, 2, 3, 5} - {*what}
        return Choice(what, 1, 2 * curve.plain_ms[0] / curve.step_ms[1][0] / (1 + 9 * len(missed)))


def test_the_layers_that_are_not_missed_are_left_out():
    choice = choose_layers(Known(TARGET, PROMPTS, 2, 4))
    assert choice.what == (0, 2, 3, 5)
    assert choice.speedup == pytest.approx(2 * 6 / (6 + 4))  # on the line through 6 and 3 layers


def test_acceptance_that_is_replayed_is_that_of_a_run():
    """All layers but one, over a table: what the replay expects of greedy text is what happens."""
    texts = Texts(TARGET, PROMPTS, 2, 40)
    generator = texts.generator(layers=(0, 1, 2, 4, 5), visible=draft_cache(12))
    flat = CostCurve([1.0], {k: [1.0] for k in range(3)})
    choice = texts.best("this", texts.read(generator), flat)
    result = generator.generate(*texts.batches[0], max_new_tokens=40, neutral=True)
    assert choice.num_draft_tokens == 2
    assert choice.speedup == pytest.approx(result.stats.acceptance_length, rel=0.1)


def test_the_script_names_a_draft_cache_by_batch_and_context(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"text": "a b a b a"}')
    few = ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "4", "--rounds", "1"]
    sizes = ["--contexts", "32", "--draft-caches", "8", "--batch-sizes", "2"]
    main(["caches", *few, *sizes, "--num-draft-tokens", "1"])
    line = capsys.readouterr().out
    assert line.startswith("2 x 32 tokens: self:8, K = 1: ")
