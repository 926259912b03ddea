"""Results and steps: every number agrees with a recount of the steps, and storage stays in place.

The statistics are recounted from the trace; the trace is checked against the text; the text is
HF's. Streaming shows the same steps, and key/value storage is allocated once per generation (once
for calls that follow each other).
"""

import json
import time

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from state_tensors import addresses

from specdec import (
    BlockSampler,
    CouplingSampler,
    EnsembleSampler,
    GenerationResult,
    ModelDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculationStats,
    SpeculativeGenerator,
    Target,
    TypicalSampler,
    certify,
    zoo,
)
from specdec.loop.runner import SLOT_MULTIPLE

MODEL = build("llama")
IDS, MASK = ragged_prompts(VOCAB, 2, 5, 8)
NUM_NEW = 21
DRAFTERS = {
    "none": None,
    "perturbed": ModelDrafter(perturbed(MODEL), num_draft_tokens=4),
    "lookup": PromptLookupDrafter(num_draft_tokens=3, max_ngram=2),
}
EOS = 34  # ends one row of three early

SAMPLERS = [
    BlockSampler(),
    RejectionSampler(),
    CouplingSampler(),
    EnsembleSampler(0.8),
    TypicalSampler(),
]


@pytest.fixture(params=DRAFTERS, name="drafter")
def _drafter(request):
    return DRAFTERS[request.param]


def generate(drafter, **options) -> GenerationResult:
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": EOS, "pad_token_id": 0} | options
    return SpeculativeGenerator(MODEL, drafter).generate(IDS, MASK, **options)


def test_the_fields_of_a_result_describe_its_sequences(drafter):
    result = generate(drafter)
    width, longest = IDS.shape[1], max(result.lengths)
    assert result.sequences.shape == (3, width + longest)
    assert result.sequences[:, :width].equal(IDS)
    assert result.new_tokens.equal(result.sequences[:, width:])
    assert sorted(result.finish_reasons) == ["eos", "length", "length"]
    for row, length, reason in zip(
        result.new_tokens.tolist(), result.lengths, result.finish_reasons, strict=True
    ):
        assert EOS not in row[: length - 1]
        assert (row[length - 1] == EOS) if reason == "eos" else (length == NUM_NEW)
        assert row[length:] == [0] * (longest - length)
    assert result.seeds is None
    assert result.trace is None


def test_the_trace_tells_how_every_token_came_about(drafter):
    result = generate(drafter, trace=True)
    for steps, row, length in zip(
        result.trace, result.new_tokens.tolist(), result.lengths, strict=True
    ):
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


def test_the_statistics_agree_with_a_recount_of_the_trace(drafter):
    result = generate(drafter, trace=True)
    stats, steps = result.stats, [step for row in result.trace for step in row]
    drafted = [len(step.draft_tokens) for step in steps]
    accepted = [step.num_accepted for step in steps]
    assert stats.steps == [len(row) for row in result.trace]
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


def test_the_identities_between_the_rates_hold(drafter):
    stats = generate(drafter).stats
    assert 1 + sum(stats.joint_rates) == pytest.approx(stats.acceptance_length)
    for accepted, steps, emitted in zip(stats.accepted, stats.steps, stats.emitted, strict=True):
        assert accepted + steps >= emitted > accepted + steps - 1 - stats.num_draft_tokens
    assert stats.block_efficiency <= stats.acceptance_length
    if drafter is DRAFTERS["perturbed"]:  # every draft is full
        product = torch.tensor(stats.conditional_rates).cumprod(dim=0)
        assert product.tolist() == pytest.approx(stats.joint_rates)
        assert 0 < stats.acceptance_rate < 1


def test_statistics_survive_json_a_frame_and_html(drafter):
    stats = generate(drafter).stats
    loaded = json.loads(stats.to_json())
    assert loaded == stats.to_dict()
    assert loaded["acceptance_length"] == stats.acceptance_length
    assert loaded["emitted"] == stats.emitted
    frame = stats.to_frame()
    assert frame.index.tolist() == list(range(1, stats.num_draft_tokens + 1))
    assert frame["joint_rate"].tolist() == stats.joint_rates
    assert frame["conditional_rate"].tolist() == stats.conditional_rates
    assert frame["reached"].tolist() == stats.reached_at
    html = stats._repr_html_()
    assert html.count("<tr>") == 1 + stats.num_draft_tokens
    assert f"{stats.acceptance_length:.2f}" in html
    assert f"{stats.acceptance_length:.2f}" in str(stats)


def test_seeds_are_reported_for_sampled_generations(drafter):
    given = generate(drafter, do_sample=True, seed=[5, 6, 7])
    assert given.seeds == [5, 6, 7]
    drawn = generate(drafter, do_sample=True)
    assert len(set(drawn.seeds)) == 3
    assert generate(drafter, do_sample=True, seed=drawn.seeds).sequences.equal(drawn.sequences)


def test_a_stream_shows_the_steps_of_generate(drafter):
    expected = generate(drafter, trace=True)
    generator = SpeculativeGenerator(MODEL, drafter)
    records = list(generator.stream(IDS, MASK, max_new_tokens=NUM_NEW, eos_token_id=EOS))
    assert [record.index for record in records] == list(range(max(expected.stats.steps)))
    for row, (steps, count) in enumerate(zip(expected.trace, expected.stats.steps, strict=True)):
        seen = [record.rows[row] for record in records]
        assert seen[count:] == [None] * (len(records) - count)
        assert [vars(step) for step in seen[:count]] == [vars(step) for step in steps]


@pytest.mark.parametrize("kept_bytes", [0, None])
def test_abandoning_a_stream_leaves_generator_and_model_usable(drafter, kept_bytes):
    expected = MODEL.generate(
        IDS, attention_mask=MASK, max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0
    )
    generator = SpeculativeGenerator(MODEL, drafter, kept_bytes=kept_bytes)
    for num_steps in (0, 1, 3):
        stream = generator.stream(IDS, MASK, max_new_tokens=NUM_NEW)
        for _ in range(num_steps):
            next(stream)
        other = MODEL.generate(
            IDS, attention_mask=MASK, max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0
        )
        assert other.equal(expected)  # while the stream is open
        stream.close()
        assert generator.generate(IDS, MASK, max_new_tokens=NUM_NEW).sequences.equal(expected)


def test_two_streams_of_one_generator_do_not_disturb_each_other(drafter):
    generator = SpeculativeGenerator(MODEL, drafter)
    prompts = {0: (IDS, MASK), 1: (IDS.flip(0), MASK.flip(0))}
    expected = {key: generator.generate(*p, max_new_tokens=NUM_NEW) for key, p in prompts.items()}
    streams = {key: generator.stream(*p, max_new_tokens=NUM_NEW) for key, p in prompts.items()}
    texts = {key: [[], [], []] for key in prompts}
    while streams:
        for key, stream in list(streams.items()):
            record = next(stream, None)
            if record is None:
                del streams[key]
                continue
            for row, step in enumerate(record.rows):
                texts[key][row] += step.new_tokens if step else []
    for key, text in texts.items():
        assert text == expected[key].new_tokens.tolist()


def test_keys_and_values_take_the_memory_of_the_longest_text(drafter):
    generator = SpeculativeGenerator(MODEL, drafter)
    generation = generator.start(IDS, MASK, max_new_tokens=NUM_NEW)
    slots = IDS.shape[1] + NUM_NEW + generator.drafter.num_draft_tokens + 1
    slots = -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE + 1
    size = 3 * slots * 2 * 3 * (2 * 8) * 4  # rows, slots, K and V, layers, heads, float32
    assert generation.state.cache.size_bytes == size


@pytest.mark.parametrize("lengths", [(8, 3, 6), (1, 1, 1)])
def test_kept_storage_serves_calls_of_equal_size_and_changes_no_text(drafter, lengths, monkeypatch):
    calls, where, verify = [], [], Target.verify

    def spy(self, cache, *args, **kwargs):
        output = verify(self, cache, *args, **kwargs)
        calls[-1].append(cache)
        where.append([keys.data_ptr() for keys in cache.keys.values()])
        return output

    generator = SpeculativeGenerator(MODEL, drafter)
    options = {"do_sample": True, "temperature": [0.0, 1.0, 1.0], "seed": [1, 2, 3]}
    for seed in range(3):
        ids, mask = ragged_prompts(VOCAB, *lengths, seed=seed)
        fresh = SpeculativeGenerator(MODEL, drafter).generate(
            ids, mask, max_new_tokens=9, **options
        )
        calls.append([])
        with monkeypatch.context() as patch:
            patch.setattr(Target, "verify", spy)
            result = generator.generate(ids, mask, max_new_tokens=9, **options)
        assert result.sequences.equal(fresh.sequences)
    assert all(caches[0] is calls[0][0] for caches in calls)  # later ones may hold fewer rows
    assert all(pointers == where[0] for pointers in where)
    other = SpeculativeGenerator(MODEL, drafter).generate(IDS[:2], max_new_tokens=4)
    assert generator.generate(IDS[:2], max_new_tokens=4).sequences.equal(other.sequences)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
def test_every_tensor_of_a_state_stays_where_it_is_from_step_to_step_and_from_call_to_call(
    drafter, sampler
):
    """A captured step reads and writes the addresses that it was captured with."""
    generator = SpeculativeGenerator(MODEL, drafter, sampler)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": EOS, "do_sample": True}
    first = generator.start(IDS, MASK, **options, seed=3, temperature=0.7, top_p=0.9)
    found = addresses(first.state)
    assert len(found) >= 12
    for _ in range(4):
        generator.step(first)
        assert addresses(first.state) == found
    signature = first.state.signature
    del first
    seen = []
    for seed in range(2):
        ids, mask = ragged_prompts(VOCAB, 4, 8, 2, seed=seed)
        sampling = {"seed": [seed, 5, 6], "temperature": 0.9 + seed / 2, "top_p": 0.5}
        generator.generate(ids, mask, **options, **sampling)
        (runner,) = generator._runners
        state = runner.state
        assert state.signature == signature
        seen.append(addresses(state))
    assert seen[0] == seen[1]


def test_statistics_of_several_generations_add_up():
    parts = [
        SpeculativeGenerator(MODEL, DRAFTERS[name]).generate(
            IDS, MASK, max_new_tokens=n, trace=True
        )
        for name, n in (("perturbed", 21), ("lookup", 9), ("perturbed", 5))
    ]
    merged = sum(part.stats for part in parts)
    rows = [row for part in parts for row in part.trace]
    recounted = SpeculationStats(rows, 4)
    assert merged.to_dict() == recounted.to_dict()
    assert merged.wall_s == pytest.approx(sum(part.stats.wall_s for part in parts))
    assert (parts[0].stats + recounted).wall_s is None
    assert parts[0].stats.steps == [len(row) for row in parts[0].trace]  # unchanged
    with pytest.raises(TypeError, match="unsupported operand"):
        merged + 3


def test_a_frame_has_one_line_per_prompt(drafter):
    result = generate(drafter, trace=True)
    frame = result.stats.to_frame_of_rows()
    assert list(frame.index) == [0, 1, 2]
    for row, steps in enumerate(result.trace):
        alone = SpeculationStats([steps], result.stats.num_draft_tokens)
        assert frame.steps[row] == len(steps)
        assert frame.emitted[row] == result.lengths[row]
        assert frame.acceptance_length[row] == pytest.approx(alone.acceptance_length)
        assert frame.block_efficiency[row] == pytest.approx(alone.block_efficiency)
        if sum(alone.drafted):
            assert frame.acceptance_rate[row] == pytest.approx(alone.acceptance_rate)


def test_wall_time_is_that_of_the_call(drafter):
    started = time.perf_counter()
    stats = generate(drafter).stats
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
    result = generator.generate(**inputs, max_new_tokens=20, trace=True, **named)
    assert result.origins == [[kind for step in row for kind in step.kinds] for row in result.trace]
    ids, pieces = result.new_tokens[0].tolist(), result.pieces(0, TOKENIZER)
    assert "".join(text for text, _ in pieces) == TOKENIZER.decode(ids)
    shown, html = repr(result), result._repr_html_()
    assert shown.startswith("GenerationResult of 1 row; SpeculationStats(acceptance length ")
    text = shown.split("row 0 (20 tokens, length): ")[1]
    for mark in "[]<>":
        text = text.replace(mark, "")
    expected = TOKENIZER.decode(ids) if has_tokenizer else " ".join(map(str, ids))
    for mark in "[]<>":
        expected = expected.replace(mark, "")
    assert text == expected
    for kind in set(result.origins[0]):
        of_key = 1
        shown = html.count(f'title="{kind}"') - of_key
        assert shown == sum(k == kind for _, k in result.pieces(0))
    if not has_tokenizer:
        assert result.pieces(0) == [
            (f"{t} ", k) for t, k in zip(ids, result.origins[0], strict=True)
        ]


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


def test_many_rows_are_shown_in_part():
    ids = torch.arange(1, 21).repeat(2)[:40].view(20, 2)
    result = SpeculativeGenerator(MODEL, None).generate(ids, max_new_tokens=2)
    assert repr(result).endswith("...")
    assert "row 7 (" in repr(result)
    assert "row 8 (" not in repr(result)


def test_parts_print_what_they_are():
    generator = SpeculativeGenerator(MODEL, DRAFTERS["perturbed"], EnsembleSampler(0.8))
    assert repr(generator) == (
        "SpeculativeGenerator(target LlamaForCausalLM, 0.0 M parameters, torch.float32 on cpu; "
        "drafter ModelDrafter, K = 4; sampler EnsembleSampler(target_weight=0.8))"
    )
    nested = RejectionSampler()
    nested.inner = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    assert "\n" in repr(nested)
    assert "\n" not in repr(SpeculativeGenerator(MODEL, None, nested))
    assert repr(TypicalSampler()) == "TypicalSampler(epsilon=0.3, delta=0.09)"
    report = certify(RejectionSampler(), sizes=((2, 1, 6),))
    assert repr(report) == str(report)
    runs = certify(SpeculativeGenerator(MODEL, None), [[1, 2]], num_samples=8, audit_tokens=2)
    assert repr(runs) == str(runs)
