"""Results and steps: every number agrees with a recount of the steps.

The statistics are recounted from the trace; the trace is checked against the text; the text is
HF's.
"""

import json
import time
from dataclasses import replace

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts

from specdec import (
    EnsembleSampler,
    GenerationResult,
    ModelDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculationStats,
    SpeculativeGenerator,
    Tree,
    TypicalSampler,
    zoo,
)
from specdec.row_step import RowStep

MODEL = build("llama")
IDS, MASK = ragged_prompts(VOCAB, 2, 5, 8)
NUM_NEW = 21
DRAFTERS = {
    "none": None,
    "perturbed": ModelDrafter(perturbed(MODEL), num_draft_tokens=4),
    "lookup": PromptLookupDrafter(num_draft_tokens=3, max_ngram=2),
}
EOS = 34  # ends one row of three early


def generate(drafter, **options) -> GenerationResult:
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": EOS, "pad_token_id": 0} | options
    return SpeculativeGenerator(MODEL, drafter).generate(IDS, MASK, **options)


@pytest.fixture(scope="module", params=DRAFTERS, name="result")
def _result(request):
    return generate(DRAFTERS[request.param])


def test_the_fields_of_a_result_describe_its_sequences(result):
    width, longest = IDS.shape[1], max(result.lengths)
    assert result.sequences.shape == (3, width + longest)
    assert result.sequences[:, :width].equal(IDS)
    assert result.new_tokens.equal(result.sequences[:, width:])
    assert sorted(result.finish_reasons) == ["eos", "length", "length"]
    rows = zip(result.new_tokens.tolist(), result.lengths, result.finish_reasons, strict=True)
    for row, length, reason in rows:
        assert EOS not in row[: length - 1]
        assert (row[length - 1] == EOS) if reason == "eos" else (length == NUM_NEW)
        assert row[length:] == [0] * (longest - length)
    assert result.seeds is result.trace is None


def test_the_steps_tell_how_every_token_came_about(result):
    rows = zip(result.steps, result.new_tokens.tolist(), result.lengths, strict=True)
    for steps, row, length in rows:
        assert [token for step in steps for token in step.new_tokens] == row[:length]
        for step in steps[:-1]:  # the last may be cut
            assert len(step.new_tokens) == step.num_accepted + 1
        for step in steps:
            accepted = step.new_tokens[: step.num_accepted]
            assert accepted == step.draft_tokens[: len(accepted)]
            is_whole = step.num_accepted == len(step.draft_tokens)
            kinds = ["accepted"] * step.num_accepted + ["bonus" if is_whole else "recovered"]
            assert step.kinds == kinds[: len(step.new_tokens)]
            if "recovered" in step.kinds:  # greedy: the draft was wrong there
                assert step.new_tokens[-1] != step.draft_tokens[step.num_accepted]


def test_the_statistics_agree_with_a_recount_of_the_steps(result):
    stats, steps = result.stats, [step for row in result.steps for step in row]
    drafted = [len(step.draft_tokens) for step in steps]
    accepted = [step.num_accepted for step in steps]
    assert stats.steps == [len(row) for row in result.steps]
    assert stats.emitted == result.lengths
    assert sum(stats.drafted) == sum(drafted)
    assert sum(stats.accepted) == sum(accepted)
    assert stats.acceptance_length == pytest.approx(1 + sum(accepted) / len(steps))
    assert stats.acceptance_rate == pytest.approx(sum(accepted) / max(1, sum(drafted)))
    assert stats.block_efficiency == pytest.approx(sum(result.lengths) / len(steps))
    for i in range(stats.num_draft_tokens):
        reached = [a > i for a, d in zip(accepted, drafted, strict=True) if a >= i and d > i]
        assert stats.joint_rates[i] == pytest.approx(sum(a > i for a in accepted) / len(steps))
        assert stats.conditional_rates[i] == pytest.approx(sum(reached) / max(1, len(reached)))


def test_numbers_are_counted_when_somebody_reads_them():
    result = generate(DRAFTERS["perturbed"])
    assert not {"stats", "origins"} & {*vars(result)}
    assert result.stats is result.stats
    assert [*map(len, result.origins)] == result.lengths
    assert result.stats.wall_s == result.wall_s > 0
    first = replace(result, steps=[row[:1] for row in result.steps])
    assert first.stats.steps == [1, 1, 1]
    assert first.stats.num_draft_tokens == first.num_draft_tokens == 4
    with pytest.raises(AttributeError, match=r"it has sequences, .*stats, origins"):
        _ = result.statistics


def test_statistics_survive_json_frames_and_html(result):
    stats = result.stats
    assert json.loads(json.dumps(stats.to_dict())) == stats.to_dict()
    assert stats.to_dict()["acceptance_length"] == stats.acceptance_length
    frame = stats.to_frame()
    assert frame.index.tolist() == list(range(1, stats.num_draft_tokens + 1))
    assert frame["joint_rate"].tolist() == stats.joint_rates
    assert frame["conditional_rate"].tolist() == stats.conditional_rates
    assert frame["reached"].tolist() == stats.reached_at
    html = stats._repr_html_()
    assert html.count("<tr>") == stats.num_draft_tokens
    assert f"{stats.acceptance_length:.2f}" in html
    assert f"{stats.acceptance_length:.2f}" in str(stats)
    frame = stats.to_frame_of_rows()
    for row, steps in enumerate(result.steps):
        alone = SpeculationStats([steps], stats.num_draft_tokens)
        assert frame.steps[row] == len(steps)
        assert frame.emitted[row] == result.lengths[row]
        assert frame.acceptance_length[row] == pytest.approx(alone.acceptance_length)
        assert frame.block_efficiency[row] == pytest.approx(alone.block_efficiency)
        if sum(alone.drafted):
            assert frame.acceptance_rate[row] == pytest.approx(alone.acceptance_rate)


def test_statistics_of_several_generations_add_up():
    parts = [
        SpeculativeGenerator(MODEL, DRAFTERS[name]).generate(IDS, MASK, max_new_tokens=n)
        for name, n in (("perturbed", 21), ("lookup", 9), ("perturbed", 5))
    ]
    merged = sum(part.stats for part in parts)
    recounted = SpeculationStats([row for part in parts for row in part.steps], 4)
    assert merged.to_dict() == recounted.to_dict()
    assert merged.wall_s == pytest.approx(sum(part.stats.wall_s for part in parts))
    assert (parts[0].stats + recounted).wall_s is None
    assert parts[0].stats.steps == [len(row) for row in parts[0].steps]  # unchanged
    with pytest.raises(TypeError, match="unsupported operand"):
        merged + 3


def test_wall_time_is_that_of_the_call():
    started = time.perf_counter()
    stats = generate(None).stats
    taken = time.perf_counter() - started
    assert 0 < stats.wall_s <= taken
    assert stats.tokens_per_s == sum(stats.emitted) / stats.wall_s
    assert f"{stats.wall_s:.2f} s" in str(stats)
    assert "wall_s" not in stats.to_dict()


TOKENIZER = zoo.load_tokenizer()


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_result_shows_its_tokens_by_origin(has_tokenizer):
    target = zoo.load_target()
    generator = SpeculativeGenerator(target, zoo.load_drafter("model", target))
    inputs = TOKENIZER("def main():\n", return_tensors="pt")
    named = {"tokenizer": TOKENIZER} if has_tokenizer else {}
    result = generator.generate(**inputs, max_new_tokens=20, **named)
    assert result.origins == [[kind for step in row for kind in step.kinds] for row in result.steps]
    ids, pieces = result.new_tokens[0].tolist(), result.pieces(0, TOKENIZER)
    assert "".join(text for text, _ in pieces) == TOKENIZER.decode(ids)
    shown, html = repr(result), result._repr_html_()
    assert shown.startswith("GenerationResult of 1 row; SpeculationStats(acceptance length ")
    expected = TOKENIZER.decode(ids) if has_tokenizer else " ".join(map(str, ids))
    bare = str.maketrans("", "", "[]<>")
    assert shown.split("row 0 (20 tokens, length): ")[1].translate(bare) == expected.translate(bare)
    for kind in set(result.origins[0]):
        in_text = html.count(f'title="{kind}"') - 1  # but for the key
        assert in_text == sum(k == kind for _, k in result.pieces(0))


def test_markers_of_ids_enclose_no_space():
    result = generate(DRAFTERS["perturbed"], max_new_tokens=20)
    text = repr(result).split("length): ")[1].splitlines()[0]
    assert "[" in text or "<" in text
    assert not any(mark in text for mark in (" ]", " >", "  "))


def test_what_a_result_shows_is_escaped():
    class Foreign:
        def decode(self, tokens, **options):
            return "\x1b[2J<script>&\n" * len(tokens)

    result = generate(None, tokenizer=Foreign(), max_new_tokens=2)
    assert "\x1b" not in repr(result) + result._repr_html_()
    assert "<script>" not in result._repr_html_()
    assert "&lt;script&gt;&amp;" in result._repr_html_()


def test_parts_print_what_they_are():
    generator = SpeculativeGenerator(MODEL, DRAFTERS["perturbed"], EnsembleSampler(0.8))
    for word in ("LlamaForCausalLM", "float32 on cpu", "ModelDrafter, K = 4", "target_weight=0.8"):
        assert word in repr(generator)
    tree = Tree(nodes=6, depth=3)
    trees = SpeculativeGenerator(MODEL, ModelDrafter(DRAFTERS["perturbed"].model, tree=tree))
    assert "ModelDrafter, tree 6x3; " in repr(trees)
    prompt = torch.tensor([[1, 2, 3]])
    assert "of 1 rows, tree 6x3, " in repr(trees.generate(prompt, max_new_tokens=2).stats)
    assert "; tree 6x3)" in repr(trees.start(prompt, max_new_tokens=2))
    nested = RejectionSampler()
    nested.inner = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    assert "\n" in repr(nested)
    assert "\n" not in repr(SpeculativeGenerator(MODEL, None, nested))
    assert repr(TypicalSampler()) == "TypicalSampler(epsilon=0.3, delta=0.09)"


def test_totals_are_those_of_all_rows_and_the_two_counts_differ_by_one_token():
    rows = [[RowStep([1, 2], 1, [1, 9])], [RowStep([3, 4], 2, [3, 4, 5]), RowStep([6], 0, [7])]]
    stats = SpeculationStats(rows, 2)
    assert (stats.steps, stats.drafted) == ([1, 2], [2, 3])
    assert stats.totals == (3, 5, 3, 6)
    assert stats.totals.emitted == sum(stats.emitted)
    assert stats.accepted_per_step == 1.0 == stats.acceptance_length - 1
    assert SpeculationStats([], 2).totals == (0, 0, 0, 0)
