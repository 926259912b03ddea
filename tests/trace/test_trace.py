"""A trace holds what an independent computation finds: plain forwards of both models over the
finished text, and the random numbers of each step's own position.
"""

import json
import time

import pytest
import torch
from architectures import VOCAB, build
from count_calls import count_calls
from drafting import perturbed, ragged_prompts

from specdec import (
    BlockSampler,
    CouplingSampler,
    ModelDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    Tree,
    TypicalSampler,
)
from specdec.graphs import no_host_sync
from specdec.lab.trace import Trace
from specdec.loop.tracer import StepTracer
from specdec.samplers import LogitsFilter, Noise, Stream

TARGET = build("llama")
DRAFT = perturbed(TARGET)
IDS, MASK = ragged_prompts(VOCAB, 3, 7, 5)
SEEDS = [11, 12, 13]
WARP = {"temperature": 0.9, "top_k": 20}
K = 3


def traced(sampler=None, drafter=None, steps_ahead=0, trace=True, **options):
    drafter, sampler = drafter or ModelDrafter(DRAFT, K), sampler or RejectionSampler()
    generator = SpeculativeGenerator(TARGET, drafter, sampler, steps_ahead=steps_ahead)
    options = {"do_sample": True, "seed": SEEDS, **WARP, **options}
    return generator.generate(IDS, MASK, max_new_tokens=20, trace=trace, **options)


@torch.no_grad()
def plain(model, ids: list[int], num_last: int) -> torch.Tensor:
    """Logits of the last tokens of a text, without a cache."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -num_last:]


def steps_of(trace):
    """(row, committed ids before the step, step, its numbers)."""
    for row, (steps, numbers) in enumerate(zip(trace.steps, trace.numbers, strict=True)):
        text = list(trace.prompts[row])
        for step, their in zip(steps, numbers, strict=True):
            yield row, list(text), step, their
            text += step.new_tokens


def test_probabilities_draws_and_entropies_are_those_of_plain_forwards_and_of_the_noise():
    trace = traced().trace
    logits_filter = LogitsFilter(1, **WARP)
    seen = 0
    for row, text, step, numbers in steps_of(trace):
        assert numbers.position == len(text) - 1
        drafted, n = step.draft_tokens, step.num_accepted
        logits = plain(TARGET, text + drafted, len(drafted) + 1)
        p = logits_filter(logits)
        q = logits_filter(plain(DRAFT, text + drafted, len(drafted) + 1))[:-1]
        index = torch.arange(len(drafted)), torch.tensor(drafted)
        assert numbers.target_probs == pytest.approx(p[index].tolist(), abs=1e-4)
        assert numbers.draft_probs == pytest.approx(q[index].tolist(), abs=1e-4)
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        assert numbers.target_entropies == pytest.approx(entropy.tolist(), abs=1e-3)
        entropy = torch.distributions.Categorical(probs=q).entropy()
        assert numbers.draft_entropies == pytest.approx(entropy.tolist(), abs=1e-3)
        noise = Noise([SEEDS[row]]).at(torch.tensor([len(text) - 1]), K + 1)
        draws = noise.uniform(Stream.ACCEPT)[0, : len(drafted)].tolist()
        assert numbers.accept_draws == draws
        decisions = zip(draws, numbers.draft_probs, numbers.target_probs, strict=True)
        kept = [u * of_draft < of_target for u, of_draft, of_target in decisions]
        assert [*kept, False].index(False) == n  # the rule, from the trace alone
        if len(step.new_tokens) == n + 1:
            extra = step.new_tokens[-1]
            assert numbers.extra_target_prob == pytest.approx(p[n, extra].item(), abs=1e-4)
            of_draft = q[n, extra].item() if n < len(drafted) else 0.0
            assert numbers.extra_draft_prob == pytest.approx(of_draft, abs=1e-4)
        seen += 1
    assert seen > 12
    assert sum(s.num_accepted for row in trace for s in row) > 0


@pytest.mark.parametrize("sampler", [RejectionSampler(), BlockSampler(), CouplingSampler()])
def test_tracing_changes_no_text_and_no_statistics(sampler):
    plain_result, result = (traced(sampler, trace=is_traced) for is_traced in (False, True))
    assert plain_result.trace is None
    assert result.sequences.equal(plain_result.sequences)
    assert result.stats.to_dict() == plain_result.stats.to_dict()
    assert [[vars(s) for s in row] for row in result.trace] == [
        [vars(s) for s in row] for row in plain_result.steps
    ]


@pytest.mark.parametrize("is_traced", [True, False])
def test_only_a_traced_run_calls_the_tracer(is_traced):
    files = count_calls(lambda: traced(trace=is_traced)).files
    assert ("loop/tracer.py" in files) is is_traced


def test_rules_without_draws_and_greedy_rows_have_none():
    for sampler in (CouplingSampler(), TypicalSampler()):
        numbers = [n for row in traced(sampler).trace.numbers for n in row]
        assert all(n.accept_draws is None for n in numbers)
    mixed = traced(temperature=[0.0, 0.9, 0.0])
    has_draws = [{n.accept_draws is not None for n in row} for row in mixed.trace.numbers]
    assert has_draws == [{False}, {True}, {False}]
    for number in mixed.trace.numbers[0]:
        assert set(number.target_probs) <= {0.0, 1.0}  # the limit of temperature 0
        assert max(number.target_entropies) > 0.01  # before temperature
    greedy = traced(do_sample=False, temperature=None, top_k=None, seed=None)
    assert all(n.accept_draws is None for row in greedy.trace.numbers for n in row)


def test_point_masses_have_probability_1_and_no_entropy():
    trace = traced(drafter=PromptLookupDrafter(K)).trace
    numbers = [n for row in trace.numbers for n in row]
    assert {q for n in numbers for q in n.draft_probs} <= {1.0}
    assert {h for n in numbers for h in n.draft_entropies} <= {0.0}
    sizes = zip(numbers, (s for row in trace for s in row), strict=True)
    assert all(len(n.draft_probs) == len(s.draft_tokens) for n, s in sizes)
    nothing = SpeculativeGenerator(TARGET, None).generate(IDS, MASK, max_new_tokens=3, trace=True)
    assert [len(n.target_entropies) for n in nothing.trace.numbers[0]] == [1, 1, 1]


def test_records_say_what_became_of_every_draft_token():
    result = traced()
    frame = result.trace.to_frame()
    assert len(frame) == len(result.trace.to_records())
    for row, (steps, length) in enumerate(zip(result.trace, result.lengths, strict=True)):
        own = frame[frame.row == row]
        kept = own[own.new_token.notna()]
        assert kept.new_token.tolist() == result.new_tokens[row, :length].tolist()
        width = len(result.trace.prompts[row])
        assert kept.position.tolist() == list(range(width, width + length))
        counts = {"accepted": sum(s.num_accepted for s in steps)}
        counts |= {"bonus": sum(s.num_accepted == K for s in steps)}
        counts |= {"rejected": sum(s.num_accepted < len(s.draft_tokens) for s in steps)}
        assert {verdict: (own.verdict == verdict).sum() for verdict in counts} == counts
        by_verdict = dict(iter(kept.groupby("verdict")))
        for of in ("draft_prob", "target_prob"):
            accepted = by_verdict["accepted"]
            assert (accepted[f"new_{of}"] == accepted[of]).all()
        extra = [n.extra_draft_prob for n in result.trace.numbers[row]]
        rejected = by_verdict["rejected"]
        assert rejected.new_draft_prob.tolist() == [extra[step] for step in rejected.step]
        assert kept[kept.verdict == "bonus"].new_draft_prob.isna().all()


@pytest.mark.parametrize("steps_ahead", [0, 2])
def test_times_are_those_of_every_step_and_together_of_no_more_than_the_call(steps_ahead):
    started = time.perf_counter()
    trace = traced(steps_ahead=steps_ahead).trace
    wall_ms = 1e3 * (time.perf_counter() - started)
    assert len(trace.times) == 1 + max(n.step for row in trace.numbers for n in row)
    for taken in trace.times:
        assert min(taken.draft_ms, taken.verify_ms, taken.sample_ms, taken.host_ms) > 0
    assert sum(taken.total_ms for taken in trace.times) < wall_ms


@pytest.mark.parametrize("tree", [None, Tree(nodes=6, depth=3, top_k=2)], ids=["chains", "trees"])
def test_a_trace_survives_jsonl_and_parquet(tree, tmp_path):
    trace = traced(drafter=ModelDrafter(DRAFT, tree=tree)).trace
    trace.to_jsonl(tmp_path / "trace.jsonl")
    read = Trace.from_jsonl(tmp_path / "trace.jsonl")
    assert read.numbers == trace.numbers
    assert read.times == trace.times
    assert read.prompts == trace.prompts
    assert read.about == json.loads(json.dumps(trace.about))
    assert read.to_records() == trace.to_records()
    pytest.importorskip("pyarrow")
    import pandas
    import pyarrow.parquet

    trace.to_parquet(tmp_path / "trace.parquet")
    pandas.testing.assert_frame_equal(
        pandas.read_parquet(tmp_path / "trace.parquet"), trace.to_frame(), check_dtype=False
    )
    metadata = pyarrow.parquet.read_schema(tmp_path / "trace.parquet").metadata
    assert json.loads(metadata[b"specdec"])["sampler"] == "RejectionSampler"


def of_line(number, change):
    """Damages one line's object."""

    def damage(lines):
        entry = json.loads(lines[number - 1])
        change(entry)
        lines[number - 1] = json.dumps(entry)

    return damage


DAMAGES = {
    "a line lost": (lambda lines: lines.pop(2), "line 3 is damaged: step"),
    "the last line lost": (lambda lines: lines.pop(), "steps of its rows, and line 1 says"),
    "a line twice": (lambda lines: lines.insert(2, lines[2]), "line 4 is damaged: step"),
    "swapped": (lambda lines: lines.insert(3, lines.pop(2)), "line 3 is damaged: step"),
    "the file twice": (lambda lines: lines.extend(list(lines)), "has no 'row'"),
    "no header": (lambda lines: lines.pop(0), "line must hold format 'specdec.trace/2'"),
    "a list": (lambda lines: lines.insert(1, "[1]"), "line 2 is damaged"),
    "three times": (of_line(1, lambda e: e["times"][0].pop()), "line 1 is damaged: .*host_ms"),
    "no draws": (of_line(3, lambda e: e.pop("accept_draws")), "line 3 is damaged: .*accept_draws"),
    "no tokens": (of_line(3, lambda e: e.pop("new_tokens")), "line 3 has no 'new_tokens'"),
    "row": (of_line(3, lambda e: e.update(row=7)), "line 3 is damaged: row"),
    "accepted": (of_line(3, lambda e: e.update(num_accepted=9)), "line 3 is damaged: num_accepted"),
    "tokens": (of_line(3, lambda e: e.update(draft_tokens="x")), "line 3 is damaged: a token"),
    "cut off": (lambda lines: lines.append(lines.pop()[:-20]), "is no JSON"),
    "probs": (of_line(3, lambda e: e["draft_probs"].pop()), "draft_probs has 2 numbers for 3"),
}


@pytest.fixture(scope="module", name="saved")
def _saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    traced().trace.to_jsonl(path)
    return path.read_text()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_its_line(damage, saved, tmp_path):
    change, message = DAMAGES[damage]
    path, lines = tmp_path / "trace.jsonl", saved.splitlines()
    change(lines)
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(ValueError, match=message):
        Trace.from_jsonl(path)


@pytest.mark.parametrize("sampler", [BlockSampler(), CouplingSampler()])
def test_taking_the_numbers_of_a_step_waits_for_nothing(sampler, monkeypatch):
    """On a GPU they are copied beside the outcome, which is read as late as ever."""
    step, seen = StepTracer.__call__, []

    def guarded(*arguments):
        with no_host_sync():
            seen.append(step(*arguments))
        return seen[-1]

    monkeypatch.setattr(StepTracer, "__call__", guarded)
    trace = traced(sampler).trace
    assert len(seen) == len(trace.times)
