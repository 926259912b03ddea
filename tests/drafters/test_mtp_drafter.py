"""`MTPDrafter` in the whole loop: laws 2, 3, 5, 7, 8 and 13, and the step that never waits.

What random heads compute is checked by `test_mtp_repair.py`, against a recomputation.
"""

import copy
from dataclasses import replace

import pytest
import torch
from architectures import build
from drafting import drawing, ragged_prompts
from eagle_heads import FeatureLoop
from eagle_oracle import STEP
from eagle_oracle import VOCAB as ORACLE_VOCAB
from head_laws import (
    IDS,
    MASK,
    NUM_NEW,
    TAMPERING,
    check_company,
    check_first_draft,
    check_greedy_text,
    check_is_exercised,
    greedy_text,
    misled,
    num_accepted,
)
from mtp_checkpoints import write_numbered
from mtp_heads import VOCAB as SMALL_VOCAB
from mtp_heads import WIDTH, WIRINGS, head_for, informed, random_drafter
from mtp_oracle import TARGET as ORACLE_TARGET
from mtp_oracle import oracle_drafter
from scipy import stats
from state_tensors import addresses, tensors_of
from text_laws import ALPHA, TARGET, p_values_of_texts, sample, tiny

from specdec import MTPDrafter, SpeculativeGenerator
from specdec.graphs import no_host_sync
from specdec.samplers import CouplingSampler, Noise, Warp
from specdec.target.cache import round_up

LLAMA = build("llama")


HEADS = {
    "random": head_for(LLAMA),
    "random, target's state": head_for(LLAMA, semantics="target", target_state=3),
    "chain": informed(LLAMA),
    "target's state": informed(LLAMA, semantics="target", zero_first_embedding=True),
    "before the norm": informed(LLAMA, target_state=3, feedback_norm=False),
}


# Law 3.


@pytest.mark.parametrize("num_draft_tokens", [2, 3, 5])
@pytest.mark.parametrize("name", HEADS)
def test_greedy_text_is_that_of_hf_in_ragged_batches_and_alone(name, num_draft_tokens):
    drafter = MTPDrafter(HEADS[name], LLAMA, num_draft_tokens)
    result = check_greedy_text(LLAMA, drafter, greedy_text(LLAMA))
    if "random" not in name:
        check_is_exercised(result)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3", "gemma3"])
def test_greedy_text_is_that_of_hf_for_other_targets(name):
    model = build(name)
    generator = SpeculativeGenerator(model, MTPDrafter(head_for(model), model, 3))
    found = generator.generate(IDS, MASK, max_new_tokens=NUM_NEW)
    assert found.sequences.equal(greedy_text(model))


# Law 5.


@pytest.mark.parametrize("sampler", ["auto", CouplingSampler()], ids=str)
@pytest.mark.parametrize(("name", "count"), [("chain", 3), ("chain", 5), ("target's state", 4)])
def test_a_row_is_the_same_alone_and_in_any_batch_order_padding_and_chunking(name, count, sampler):
    drafter = MTPDrafter(HEADS[name], LLAMA, count, draft_temperature=0.8)
    check_company(LLAMA, drafter, sampler, chunk=2)


def test_a_row_of_one_token_proposes_nothing_until_the_target_has_read_it():
    check_first_draft(LLAMA, MTPDrafter(HEADS["chain"], LLAMA, 4), first=0)


# Law 2.


@pytest.mark.parametrize(("semantics", "warp"), [("chain", "plain"), ("target", "truncated")])
def test_texts_have_the_targets_law(semantics, warp):
    """Chi-square of 10000 rows; false-alarm rate and resolution as in `test_sampling_runs`."""
    model = tiny(TARGET)
    head = head_for(model, num_depths=2, semantics=semantics)
    result = sample(MTPDrafter(head, model, 2), "auto", warp)
    for length, p in p_values_of_texts(result, warp).items():
        assert p > ALPHA, f"texts of {length} tokens"
    assert 0.1 < result.stats.acceptance_rate < 0.95  # both branches are exercised


# Law 7: modules that know a target whose next token depends on token and position.

ORACLE_IDS, ORACLE_MASK = ragged_prompts(ORACLE_VOCAB, 8, 1, 5)


def oracle_acceptance(drafter, chunk=2048, **options):
    generator = SpeculativeGenerator(ORACLE_TARGET, drafter, prefill_chunk_size=chunk)
    result = generator.generate(
        ORACLE_IDS, ORACLE_MASK, max_new_tokens=40, trace=True, eos_token_id=None, **options
    )
    return num_accepted(result)


ORACLES = [("chain", 1, 3), ("chain", 3, 3), ("chain", 3, 7), ("chain", 4, 2), ("target", 4, 4)]


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": [1, 2, 3]}], ids=str)
@pytest.mark.parametrize(("semantics", "depths", "width"), ORACLES)
def test_a_head_that_knows_the_target_is_never_rejected(semantics, depths, width, options, chunk):
    accepted = oracle_acceptance(oracle_drafter(semantics, depths, width), chunk, **options)
    full, one_token = -(-40 // (width + 1)), -(-39 // (width + 1))
    assert accepted == [[width] * full, [0] + [width] * one_token, [width] * full]


@pytest.mark.parametrize("tampering", TAMPERING)
def test_the_oracle_notices_whatever_is_out_of_place(tampering):
    assert STEP > 0
    drafter = misled(oracle_drafter("chain", 3, 4), tampering)
    rate = [a for row in oracle_acceptance(drafter) for a in row[1:]]
    assert sum(rate) < 0.5 * 4 * len(rate)


# Law 8.


@pytest.mark.parametrize("name", ["chain", "target", "two depths"])
@torch.no_grad()
def test_drafts_are_drawn_from_the_probabilities_that_come_with_them(name):
    """Chi-square of the third token given the first two, and of the first; 4000 draws each with
    noise of its own, false-alarm rate 1e-6 each. A distribution that is 2 % off fails.
    """
    rows, num_draft_tokens = 4000, 3
    drafter = random_drafter(name, num_draft_tokens)
    state = drafter.init_state(rows, 20, vocab_size=SMALL_VOCAB, device=torch.device("cpu"))
    one = torch.randn(1, 20, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    loop = FeatureLoop([[3, 1, 4]] * rows, num_draft_tokens, one.expand(rows, -1, -1))
    loop.prefill(drafter, state, 8)
    noise = Noise(list(range(rows))).at(torch.full((rows,), 2), num_draft_tokens + 1)
    warp = Warp(rows, temperature=0.7)
    draft = drafter.propose(loop.context(), state, drawing(drafter, warp, noise))
    tokens = draft.tokens
    first = draft.probs[0, 0]
    torch.testing.assert_close(draft.probs[:, 0], first.expand(rows, -1))
    counts = tokens[:, 0].bincount(minlength=SMALL_VOCAB)
    assert stats.chisquare(counts.numpy(), (rows * first).numpy()).pvalue > 1e-6
    score, variance = 0.0, 0.0
    for index in (1, 2):  # the sum over rows of p(drawn) has a known mean and variance
        p = draft.probs[:, index].double()
        drawn = p.gather(1, tokens[:, index : index + 1])[:, 0]
        mean = p.square().sum(1)
        score += float((drawn - mean).sum())
        variance += float(((p**3).sum(1) - mean**2).sum())
    assert abs(score) < 5 * variance**0.5
    wrong = draft.probs[:, 0].roll(1, dims=1)[0]
    assert stats.chisquare(counts.numpy(), (rows * wrong).numpy()).pvalue < 1e-6


# Law 13.


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("name", ["chain", "target's state"])
@torch.inference_mode()
def test_what_must_not_be_read_changes_nothing(name, count):
    """Garbage in every entry that a step has to compute, in columns of the context that hold no
    token, and in remembered rows before a text's start; NaN where not even a mask may be relied on.
    """
    generator = SpeculativeGenerator(LLAMA, MTPDrafter(HEADS[name], LLAMA, count))
    options = {"max_new_tokens": 40, "eos_token_id": None, "do_sample": True, "seed": 3}
    clean, poisoned = (generator.start(IDS, MASK, **options) for _ in range(2))
    for _ in range(6):
        state = poisoned.state
        drafter_state, buffer = state.drafter_state, state.buffer
        unknown = torch.arange(count + 1) >= buffer.num_new[:, None]
        state.features[unknown] = torch.nan
        buffer.recent[:, 1:][unknown] = -1
        past = drafter_state.past
        reach = torch.arange(-past.tokens.shape[1], 0) + buffer.start[:, None]
        past.features[reach < 0] = torch.nan
        past.tokens[reach < 0] = 10**9
        cache, slots = drafter_state.cache, torch.arange(drafter_state.cache.num_slots + 1)
        buffers = *cache.keys.values(), *cache.values.values()
        attended = round_up(poisoned.state.num_attended)
        anchor, has_new = buffer.start + buffer.num_new, (buffer.num_new > 0)[:, None]
        for depth in cache.keys:
            # What depends on more than the committed tokens, or is not there yet.
            provisional = slots >= torch.minimum(buffer.start, anchor - depth - 1)[:, None]
            for table in (cache.keys[depth], cache.values[depth]):
                table[provisional & has_new & (slots < attended)] = 1e30
                table[:, slots >= attended] = torch.nan
        expected, outcome = generator.step(clean), generator.step(poisoned)
        is_valid = expected.draft.num_valid > 0
        assert outcome.draft.num_valid.equal(expected.draft.num_valid)
        assert outcome.draft.tokens[is_valid].equal(expected.draft.tokens[is_valid])
        assert outcome.draft.probs[is_valid].equal(expected.draft.probs[is_valid])
        assert outcome.verdict.tokens.equal(expected.verdict.tokens)
        for table in buffers:
            table.nan_to_num_()  # the next step reaches further
        past.features.nan_to_num_()


@pytest.mark.parametrize(("name", "count"), [("chain", 2), ("chain", 3), ("target's state", 5)])
@pytest.mark.parametrize(
    "gate", [{}, {"do_sample": True, "top_k": 9, "top_p": 0.8, "seed": 2}], ids=str
)
def test_a_step_runs_without_waiting_and_always_in_the_same_shapes(name, count, gate):
    generator = SpeculativeGenerator(LLAMA, MTPDrafter(HEADS[name], LLAMA, count))
    state = generator.start(IDS, MASK, max_new_tokens=40, eos_token_id=None, **gate)
    steps = []
    for _ in range(3):
        state.state.buffer.note_longest(10**9)
        with no_host_sync() as seen:
            generator.step(state)
        steps.append(seen.shapes)
    assert len(steps[0]) > 100
    assert steps[0] == steps[1] == steps[2]


def test_a_step_of_modules_that_are_mixtures_of_experts_runs_without_waiting(tmp_path):
    model, _ = write_numbered(tmp_path, "DeepseekV3", num_depths=2)
    model.set_experts_implementation("batched_mm")
    drafter = MTPDrafter.from_pretrained(tmp_path, model, 3)
    generator = SpeculativeGenerator(model, drafter)
    state = generator.start(IDS, MASK, max_new_tokens=40, eos_token_id=None)
    steps = []
    for _ in range(3):
        state.state.buffer.note_longest(10**9)
        with no_host_sync() as seen:
            generator.step(state)
        steps.append(seen.shapes)
    assert steps[0] == steps[1] == steps[2]


def test_storage_does_not_grow_and_does_not_move():
    generator = SpeculativeGenerator(LLAMA, MTPDrafter(HEADS["chain"], LLAMA, 4))
    generation = generator.start(IDS, MASK, max_new_tokens=50, eos_token_id=None)
    state = generation.state.drafter_state
    before, names = addresses(state), set(tensors_of(state))
    assert {".past.tokens", ".past.features", ".angles"} < names
    for _ in range(60):  # rows end on the way
        generator.step(generation)
    assert bool(generation.has_ended.all())
    assert addresses(state) == before


@torch.no_grad()
def test_a_state_that_was_reset_forgets_the_rows_to_repair_from():
    drafter = random_drafter("chain")
    device = torch.device("cpu")
    state = drafter.init_state(2, 40, vocab_size=SMALL_VOCAB, device=device)
    fresh = {name: tensor.clone() for name, tensor in tensors_of(state).items()}
    features = torch.randn(2, 40, WIDTH, dtype=torch.float64)
    loop = FeatureLoop([[1, 2, 3, 4, 5], [6, 7, 8]], 3, features)
    loop.prefill(drafter, state, 2)
    used = copy.deepcopy(tensors_of(state))
    assert not used[".past.features"].equal(fresh[".past.features"])
    state.reset()
    assert all(tensor.equal(fresh[name]) for name, tensor in tensors_of(state).items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_head_of_another_data_type_than_the_target_drafts_for_it(dtype):
    options = {"max_new_tokens": NUM_NEW}
    text = SpeculativeGenerator(LLAMA, None).generate(IDS, MASK, **options).sequences
    drafter = MTPDrafter(copy.deepcopy(HEADS["chain"]).to(dtype), LLAMA, 4)
    generator = SpeculativeGenerator(LLAMA, drafter)
    assert generator.generate(IDS, MASK, **options).sequences.equal(text)
    generator.generate(IDS, MASK, do_sample=True, seed=1, **options)


def test_no_draft_tokens_decode_plainly():
    text = SpeculativeGenerator(LLAMA, None).generate(IDS, MASK, max_new_tokens=8).sequences
    generator = SpeculativeGenerator(LLAMA, MTPDrafter(HEADS["chain"], LLAMA, 0))
    assert generator.generate(IDS, MASK, max_new_tokens=8).sequences.equal(text)


def test_a_context_without_features_or_with_others_is_refused():
    drafter = random_drafter("chain")
    state = drafter.init_state(1, 20, vocab_size=SMALL_VOCAB, device=torch.device("cpu"))
    loop = FeatureLoop([[1, 2, 3]], 3, torch.zeros(1, 20, WIDTH + 1))
    before = {name: tensor.clone() for name, tensor in tensors_of(state).items()}
    with pytest.raises(ValueError, match="reads one feature of width 16, and the target's are 17"):
        drafter.prefill(loop.context(), state)
    with pytest.raises(ValueError, match="needs the target's features"):
        drafter.prefill(replace(loop.context(), features=None), state)
    assert all(tensor.equal(before[name]) for name, tensor in tensors_of(state).items())


def test_every_wiring_of_the_tests_is_another():
    assert len({repr(config) for config in WIRINGS.values()}) == len(WIRINGS)
