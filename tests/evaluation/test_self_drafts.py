"""How a target drafts for itself is chosen by what was measured, and a search goes on."""

import json

import pytest
from architectures import VOCAB, build
from drafting import ragged_prompts

from specdec import SelfDrafter, SpeculativeGenerator, Target
from specdec.cli import main
from specdec.drafters.visible import draft_cache
from specdec.evaluation import choose_layers, self_drafts
from specdec.evaluation.costs import CostCurve
from specdec.evaluation.self_drafts import plan_draft_caches
from specdec.loading import load_drafter

TARGET = Target(build("gemma3"))
PROMPTS = [ids[-n:].tolist() for ids, n in zip(ragged_prompts(VOCAB, 4, 9)[0], (4, 9), strict=True)]
FEW = {"num_draft_tokens": 2, "max_new_tokens": 8, "rounds": 1}


@pytest.fixture(name="accepted")
def _accepted(monkeypatch):
    """Layers 1 and 4 are not missed, and each layer costs the same: the best set is known."""

    def best(self, read, curve):
        layers = read.drafter.layers
        missed = {0, 2, 3, 5} - {*layers}
        return 1, 2 * curve.plain_ms[0] / curve.step_ms[1][0] / (1 + 9 * len(missed))

    texts = self_drafts._Texts
    monkeypatch.setattr(texts, "best", best)
    monkeypatch.setattr(texts, "read", lambda self, generator: generator)
    monkeypatch.setattr(
        texts,
        "costs",
        lambda self, generator, rounds: CostCurve(
            [6.0], {k: [6.0 + k * len(generator.drafter.layers)] for k in range(3)}
        ),
    )


def test_the_layers_that_are_not_missed_are_left_out(accepted):
    choice = choose_layers(TARGET, PROMPTS, **FEW)
    assert choice.layers == (0, 2, 3, 5)
    assert choice.speedup == pytest.approx(2 * 6 / (6 + 4))  # on the line through 6 and 3 layers


def test_a_search_that_was_interrupted_goes_on_and_refuses_other_settings(tmp_path):
    file = tmp_path / "search.jsonl"
    whole = choose_layers(TARGET, PROMPTS, output=file, **FEW)
    lines = file.read_bytes().splitlines(keepends=True)
    assert [len(json.loads(line)[0]) for line in lines[1:7]] == [5] * 6
    file.write_bytes(b"".join(lines[:4]) + lines[4][:9])  # in the middle of a line
    again = choose_layers(TARGET, PROMPTS, output=file, **FEW)
    assert (again.layers, again.num_draft_tokens) == (whole.layers, whole.num_draft_tokens)
    file.write_bytes(lines[0])
    choose_layers(TARGET, PROMPTS, output=file, **FEW)
    assert file.read_bytes() == b"".join(lines)  # times are those of the file, texts are greedy
    with pytest.raises(ValueError, match="holds another search, by most"):
        choose_layers(TARGET, PROMPTS, output=file, **FEW | {"num_draft_tokens": 1})
    file.write_text("a diary")
    with pytest.raises(ValueError, match="would be lost"):
        choose_layers(TARGET, PROMPTS, output=file, **FEW)
    assert file.read_text() == "a diary"


def test_acceptance_that_is_replayed_is_that_of_a_run():
    """All layers but one, over a table: what the replay expects of greedy text is what happens."""
    texts = self_drafts._Texts(TARGET, PROMPTS, 2, {"max_new_tokens": 40})
    drafter = SelfDrafter(TARGET, 2, layers=(0, 1, 2, 4, 5), visible=draft_cache(12))
    generator = SpeculativeGenerator(TARGET, drafter)
    flat = CostCurve([1.0], {k: [1.0] for k in range(3)})
    k, speedup = texts.best(texts.read(generator), flat)
    result = generator.generate(*texts._batches[0], **texts._options)
    assert k == 2
    assert speedup == pytest.approx(result.stats.acceptance_length, rel=0.1)


def test_draft_caches_are_planned_by_batch_and_context():
    sizes = {"draft_caches": [6, 60], "batch_sizes": [1, 2], "contexts": [20]}
    found = plan_draft_caches(TARGET, PROMPTS, **sizes, **FEW)
    assert list(found) == [(1, 20), (2, 20)]
    assert all(choice.draft_cache in (6, 60) and choice.speedup > 0 for choice in found.values())


def test_a_draft_cache_has_a_name():
    assert load_drafter("self:20", TARGET, 3).visible == draft_cache(20)
    with pytest.raises(ValueError, match="the draft cache must be an integer >= 5"):
        load_drafter("self:4", TARGET)
    for name, options in (("self", {}), ("self:all", {}), ("self:20", {"tree": "4x2"})):
        with pytest.raises(ValueError, match="self:1024 for instance"):
            load_drafter(name, TARGET, **options)


def test_the_command_names_a_draft_cache_by_context_and_batch(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"text": "a b a b a"}')
    command = ["plan", "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "4"]
    command += ["--num-draft-tokens", "1", "--rounds", "1", "--drafter"]
    own = ["self", "--contexts", "32", "--draft-caches", "8", "--batch-sizes", "1,2"]
    assert main([*command, *own]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("at 32 tokens and 1 row: a draft cache of 8, K = 1, ")
    assert lines[1].startswith("at 32 tokens and 2 rows: a draft cache of 8, K = 1, ")
    for arguments, message in [
        (["lookup", "--contexts", "32"], "--contexts belongs to --drafter self"),
        ([*own, "--tree", "4x2"], "--tree does not belong to --drafter self"),
    ]:
        assert main([*command, *arguments]) != 0
        assert message in capsys.readouterr().err


WRONG = [
    (r"target must be a specdec Target, got 'x'; pass Target\(model\)", "x", [[5]]),
    ("target must be a specdec Target, got a Gemma3", TARGET.model, [[5]]),
    ("got the class Target", Target, [[5]]),
    ("prompts must be lists of integers.*pass token ids", TARGET, "abc"),
    ("prompts must be lists of integers", TARGET, ["abc"]),
    ("prompts must be lists of integers", TARGET, 3),
    ("prompts must be lists of integers", TARGET, [3]),
    ("prompts must be lists of integers", TARGET, None),
    ("at least one token in each", TARGET, [[5], []]),
]


@pytest.mark.parametrize("search", [choose_layers, plan_draft_caches])
@pytest.mark.parametrize(("message", "target", "prompts"), WRONG)
def test_what_cannot_be_searched_is_refused_in_words(search, message, target, prompts):
    with pytest.raises((TypeError, ValueError), match=message):
        search(target, prompts, max_new_tokens=4)


def test_a_search_is_written_to_a_file_alone():
    with pytest.raises(TypeError, match="output must be the path of a file of JSON lines, got 3"):
        choose_layers(TARGET, [[5]], output=3, **FEW)
