"""The loop at its edges: a late host, rows cut by a criterion, copies, long rotary ranges.

Each of these once went wrong, or could only be seen on a GPU.
"""

import copy
import itertools

import pytest
import torch
from architectures import VOCAB, build
from diagonal import diagonal
from drafting import perturbed, ragged_prompts
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec import ModelDrafter, PromptLookupDrafter, SpeculativeGenerator, Target, Tree
from specdec.loop.host import OutputCollector
from specdec.loop.replay import Replay
from specdec.request.call import read_request
from specdec.samplers import LogitsFilter

MODEL = build("llama")
IDS, MASK = ragged_prompts(VOCAB, 3, 9, 1)
DRAFTERS = {
    "model": lambda: ModelDrafter(perturbed(MODEL)),
    "target": lambda: ModelDrafter(MODEL),
    "lookup": lambda: PromptLookupDrafter(6),
}
TREES = {"tree": lambda: ModelDrafter(perturbed(MODEL), tree=Tree(nodes=5, depth=2))}


def stop_the_longest_row_at(num_new: int):
    """Met in the row whose prompt is that of row 1 once it has so many new tokens."""
    prompt = IDS[1]

    def stop(input_ids, scores, **kwargs):
        is_row = input_ids.shape[1] >= len(prompt) and input_ids[0, : len(prompt)].equal(prompt)
        return is_row and input_ids.shape[1] - len(prompt) >= num_new

    return [stop]


SAMPLED = {"do_sample": True, "seed": [1, 2, 3]}


def run(drafter, *, steps_ahead=0, graphs=False, max_new_tokens=20, **options):
    generator = SpeculativeGenerator(MODEL, drafter, steps_ahead=steps_ahead, graphs=graphs)
    return generator.generate(IDS, MASK, max_new_tokens=max_new_tokens, **options)


@pytest.mark.parametrize(
    ("drafter", "options", "graphs"),
    [("target", {}, False), ("lookup", {}, True), ("model", SAMPLED, False), ("model", {}, True)],
)
def test_a_host_that_reads_one_step_late_reads_the_same_text(drafter, options, graphs):
    now = run(DRAFTERS[drafter](), eos_token_id=34, **options)
    late = run(DRAFTERS[drafter](), eos_token_id=34, steps_ahead=1, graphs=graphs, **options)
    assert torch.equal(now.sequences, late.sequences)
    assert (now.lengths, now.finish_reasons) == (late.lengths, late.finish_reasons)
    assert now.stats.to_dict() == late.stats.to_dict()


@pytest.mark.parametrize("steps_ahead", [1, 3])
def test_steps_attend_over_all_that_was_committed_though_the_host_has_not_read_it(steps_ahead):
    """Every draft token is accepted, so rows grow as fast as they can, past many slot multiples."""
    options = {"max_new_tokens": 90, "eos_token_id": None}
    expected = run(None, **options)
    late = run(DRAFTERS["target"](), steps_ahead=steps_ahead, **options)
    assert torch.equal(late.sequences, expected.sequences)


def events_of(monkeypatch, drafter, steps_ahead, graphs=True, **options):
    """A call, and in order what its host did: s(tep issued), r(ead)."""
    events = []
    for kind, name, event in ((Replay, "__call__", "s"), (OutputCollector, "add", "r")):
        plain = getattr(kind, name)

        def noting(self, *args, plain=plain, event=event, **kwargs):
            events.append(event)
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, noting)
    result = run(drafter, steps_ahead=steps_ahead, graphs=graphs, **options)
    monkeypatch.undo()
    return result, "".join(events)


@pytest.mark.parametrize(
    ("drafter", "steps_ahead"), diagonal([*DRAFTERS, "none", "tree"], [3, 1, 0])
)
def test_no_step_is_issued_in_vain_by_a_call_that_ends_by_length(monkeypatch, drafter, steps_ahead):
    part = TREES[drafter]() if drafter in TREES else DRAFTERS.get(drafter, lambda: None)()
    k = 0 if part is None else (part.tree_depth or part.num_draft_tokens)
    for room in (1, 2, 7, 33):
        options = {"max_new_tokens": room, "eos_token_id": None, **SAMPLED}
        found, events = events_of(monkeypatch, part, steps_ahead, **options)
        assert torch.equal(found.sequences, run(part, **options).sequences)
        num_steps = max(found.stats.steps)
        assert (events.count("s"), events.count("r")) == (num_steps, num_steps)
        # And the host does run ahead as long as the steps under way cannot be the last.
        surely = max(0, -(-room // (k + 1)) - 1)
        assert events.startswith("s" * min(surely, steps_ahead + 1))
    found, events = events_of(monkeypatch, part, steps_ahead, eos_token_id=None, max_new_tokens=33)
    first_end = int(found.new_tokens[0, 2])
    one = {"eos_token_id": first_end, "max_new_tokens": 33}
    ended, events = events_of(monkeypatch, part, steps_ahead, **one)
    assert events.count("s") - events.count("r") <= steps_ahead  # an end by a token: nobody knew
    assert events.count("r") == max(ended.stats.steps)


@pytest.mark.parametrize(("drafter", "steps_ahead"), [("model", 0), ("target", 1), ("lookup", 1)])
def test_a_criterion_that_cuts_the_longest_row_leaves_the_others_alone(drafter, steps_ahead):
    free = run(DRAFTERS[drafter]())
    for num_new in (1, 3, 7):
        stop = {"stopping_criteria": stop_the_longest_row_at(num_new)}
        cut = run(DRAFTERS[drafter](), steps_ahead=steps_ahead, **stop)
        assert cut.lengths == [20, num_new, 20]
        assert cut.finish_reasons == ["length", "stop", "length"]
        assert torch.equal(cut.new_tokens[[0, 2]], free.new_tokens[[0, 2]])
        assert torch.equal(cut.new_tokens[1, :num_new], free.new_tokens[1, :num_new])


def long_rope_model():
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    first_range = {"original_max_position_embeddings": 24}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors, **first_range}
    sizes = {"max_position_embeddings": 64, "sliding_window": None}
    return build("phi3", **sizes, **first_range, rope_parameters=rope)


def test_a_rotary_scaling_by_length_is_served_within_its_first_range_and_refused_beyond():
    model = long_rope_model()
    generator = SpeculativeGenerator(model, ModelDrafter(perturbed(model)))
    options = {"max_new_tokens": 15, "do_sample": False}
    expected = model.generate(IDS, attention_mask=MASK, **options)
    assert torch.equal(generator.generate(IDS, MASK, **options).sequences, expected)
    with pytest.raises(ValueError, match=r"make 25, but the target has 24 positions: .*'longrope'"):
        generator.generate(IDS, MASK, max_new_tokens=16)


def test_kept_storage_serves_prompts_of_other_lengths_and_other_modes():
    generator = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL)))
    with torch.inference_mode():
        generator.generate(IDS[:1, -1:], max_new_tokens=9)
    for prompt, num_new in ((IDS[1:2, :2], 8), (IDS[1:2, :1], 9)):
        kept = generator.generate(prompt, max_new_tokens=num_new)
        fresh = SpeculativeGenerator(MODEL, None).generate(prompt, max_new_tokens=num_new)
        assert torch.equal(kept.sequences, fresh.sequences)


def test_a_warper_of_the_users_own_takes_the_place_of_a_value_as_in_hf():
    own = LogitsProcessorList([TemperatureLogitsWarper(1e-5)])
    options = {"do_sample": True, "max_new_tokens": 12, "seed": 5}
    generator = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL)))
    greedy = generator.generate(IDS, MASK, max_new_tokens=12)
    cold = generator.generate(IDS, MASK, logits_processor=own, temperature=2.0, **options)
    assert torch.equal(cold.sequences, greedy.sequences)
    with pytest.raises(ValueError, match="per row beside TemperatureLogitsWarper"):
        generator.generate(IDS, MASK, logits_processor=own, temperature=[1.0] * 3, **options)


WARPERS = {
    "temperature": TemperatureLogitsWarper(0.5),
    "top_k": TopKLogitsWarper(4),
    "top_p": TopPLogitsWarper(0.6),
    "min_p": MinPLogitsWarper(0.2),
}


def test_warpers_of_the_users_own_keep_their_order():
    """Temperature behind a truncation is another law than before it."""
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(0))
    ids, sampled = IDS[:1].expand(200, -1), {"do_sample": True, "top_k": 0, "max_new_tokens": 4}
    for order in itertools.permutations(WARPERS):
        own = LogitsProcessorList([WARPERS[name] for name in order])
        request = read_request(Target(MODEL), IDS, None, {"logits_processor": own, **sampled})
        before = [processor for _, row in request.processors[:1] for processor in row]
        law = LogitsFilter(200, **request.logits_filter)(
            LogitsProcessorList(before)(ids, logits.clone())
        )
        torch.testing.assert_close(law, own(ids, logits.clone()).softmax(-1), rtol=0, atol=1e-6)


def test_kept_storage_forgets_what_a_broken_draft_model_left_in_it():
    """Masked slots have weight 0, and 0 * NaN is NaN."""
    draft = copy.deepcopy(MODEL)
    generator = SpeculativeGenerator(MODEL, ModelDrafter(draft))
    expected = generator.generate(IDS, MASK, max_new_tokens=9)
    assert expected.stats.acceptance_rate == 1
    weight = draft.model.layers[0].self_attn.v_proj.weight
    sound = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    broken = generator.generate(IDS, MASK, max_new_tokens=9)
    assert torch.equal(broken.sequences, expected.sequences)
    assert broken.stats.acceptance_rate < 0.5
    with torch.no_grad():
        weight.copy_(sound)
    assert generator.generate(IDS, MASK, max_new_tokens=9).stats.acceptance_rate == 1


def test_a_row_cut_inside_an_accepted_block_may_be_the_longest_on_the_device():
    """Its tokens behind the cut are there, and a lookup reads to the end of every row."""
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all logits equal: the text is 0, 0, 0, ..., as lookup says
    ids = torch.zeros_like(IDS)
    ids[1, 0] = 5

    def stop(input_ids, scores, **kwargs):
        return input_ids[:, 0] == 5

    generator = SpeculativeGenerator(model, PromptLookupDrafter(6), steps_ahead=1)
    result = generator.generate(ids, MASK, max_new_tokens=20, stopping_criteria=[stop])
    assert result.lengths == [20, 1, 20]
    assert result.stats.accepted[1] == 5  # as many as follow its match in the prompt
    assert not result.new_tokens.any()


def test_a_generation_stepped_by_hand_has_the_text_and_says_what_it_is():
    generator = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL)))
    options = {"max_new_tokens": 20, "do_sample": True, "seed": [1, 2, 3], "eos_token_id": []}
    result = generator.generate(IDS, MASK, **options)
    generation = generator.start(IDS, MASK, **options)
    assert repr(generation) == (
        "Generation(0 of 3 rows ended; lengths [3, 9, 1], prompts included; K = 4)"
    )
    while not generation.has_ended.all():
        generator.step(generation)
    assert repr(generation).startswith("Generation(3 of 3 rows ended; lengths [23, 29, 21], ")
    for row, (tokens, length) in enumerate(zip(generation.tokens, generation.lengths, strict=True)):
        prompt = IDS[row][MASK[row].bool()].tolist()
        assert tokens[:length].tolist() == prompt + result.new_tokens[row].tolist()

    for _ in range(7):  # after the end nothing is committed
        assert generator.step(generation).num_new.tolist() == [0, 0, 0]
    generation = generator.start(IDS, MASK, max_new_tokens=5)
    generation.end_rows([0])
    generation.drop_ended()
    assert repr(generation).startswith("Generation(1 of 3 rows ended; lengths [1, 9], ")
