"""Everything that is measured works where steps are captured, as where they are eager.

On a CPU captured steps are the same function under the same checks; the tests of a GPU replay
graphs.
"""

import copy
import dataclasses

import pytest
import torch
from diagonal import PLACES
from test_certify_noise import ReusedOnTheNextStep, with_noise
from test_certify_runs import Stateless
from text_laws import DRAFT, PROMPT, TARGET, tiny

from examples.replay import every_position, replay
from specdec import (
    Draft,
    ModelDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    certify,
    evaluate,
)
from specdec.lab.certificates.generator.noise import audit_noise
from specdec.lab.certificates.generator.text import audit_text
from specdec.lab.evaluation import compare, measure_costs
from specdec.request import Sampling
from specdec.samplers import BlockSampler

QUICK = {"num_samples": 32, "max_new_tokens": 8, "audit_tokens": 12}
on_each = pytest.mark.parametrize("device", PLACES)


def generators(device, sampler="auto", drafter=None):
    """One that captures steps, and one that does not."""
    models = [copy.deepcopy(tiny(seed)).to(device) for seed in (TARGET, DRAFT)]
    drafter = drafter or ModelDrafter(models[1], num_draft_tokens=2)
    first = SpeculativeGenerator(models[0], drafter, sampler, graphs=True)
    return first, SpeculativeGenerator(first.target, drafter, sampler, graphs=False)


def leaves(value, name="") -> dict:
    """Every number and text of a report, by its name."""
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: x for key, part in pairs for k, x in leaves(part, f"{name}.{key}").items()}
    return {name: value}


@on_each
def test_a_certificate_of_captured_steps_is_that_of_eager_ones(device):
    """The same tokens and acceptance, and numbers up to rounding: a batch that is filled up to a
    captured size rounds otherwise.
    """
    captured, eager = (certify(g, [PROMPT, [3]], **QUICK) for g in generators(device))
    assert captured.passed, captured
    assert captured.noise == eager.noise
    assert captured.rows.num_steps == eager.rows.num_steps
    found, expected = (leaves(dataclasses.asdict(each.text)) for each in (captured, eager))
    # Each token's bet moves by a few roundings of its probability, and bets add up.
    eps, count = torch.finfo(torch.float32).eps, expected[".num_tokens"]
    rounding = eps * count if device == "cpu" else 1e-3
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, float):
            assert found[name] == pytest.approx(value, rel=0, abs=rounding), name
        else:
            assert found[name] == value, name


@on_each
def test_coupled_text_of_captured_steps_is_that_of_eager_ones(device):
    options = [PROMPT, [3]], 20, Sampling(top_k=4)
    both = [audit_text(g, *options) for g in generators(device, "coupling")]
    assert both[0].passed
    assert both[0].num_tokens == both[1].num_tokens == 40


@on_each
def test_noise_that_is_used_twice_is_found_in_captured_steps(device):
    captured, eager = generators(device, with_noise(ReusedOnTheNextStep))
    found = [audit_noise(g, [PROMPT, [2, 2]], 20, Sampling(top_k=4)) for g in (captured, eager)]
    assert found[0] == found[1]
    assert not found[0].passed
    assert found[0].num_repeated > 20


@on_each
def test_measurements_of_captured_steps_are_those_of_eager_ones(device):
    both = generators(device, RejectionSampler())
    options = {"max_new_tokens": 16, "temperature": 1.0, "batch_size": 3}
    prompts = [PROMPT, [3, 0], [5, 0, 2], [1], [2], [4]]
    found = [evaluate(g, prompts, **options).stats.to_dict() for g in both]
    assert found[0] == found[1]
    compared = compare(dict(zip("ab", both, strict=True)), prompts, rounds=1, **options)
    assert [run.stats.to_dict() for run in compared.runs] == [found[0]] * 2
    ids = torch.tensor([PROMPT] * 6, device=device)
    run = {"max_new_tokens": 12, "do_sample": True, "seed": list(range(6))}
    traces = [g.generate(ids, trace=True, **run).trace for g in both]
    replays = [
        replay(every_position(g, t), num_draft_tokens=2, sampler=BlockSampler())
        for g, t in zip(both, traces, strict=True)
    ]
    assert replays[0].acceptance_length == replays[1].acceptance_length
    checked = both[0].generate(ids, check=True, **run)
    assert checked.sequences.equal(both[1].generate(ids, **run).sequences)
    assert measure_costs(both[0], ids, num_steps=2, rounds=1).step_ms.keys() == {0, 1, 2}


class Remembers(Stateless):
    """Drafts what followed the root's id last, in any request, by a deterministic proposal."""

    has_memory = True

    def __init__(self, vocab_size):
        super().__init__()
        self.num_draft_tokens = 1
        self.register_buffer("after", torch.zeros(vocab_size, dtype=torch.long))

    def propose(self, context, state, drawing):
        """The first row's last token is remembered, and every row drafts from the memory."""
        roots = context.tokens.gather(1, context.num_new.clamp(min=0)[:, None])
        before = context.tokens.gather(1, (context.num_new - 1).clamp(min=0)[:, None])
        self.after[before[0]] = roots[0]
        return Draft(self.after[roots[:, : drawing.num_draft_tokens]])


class RemembersUnsaid(Remembers):
    """Its memory is not declared."""

    has_memory = False


class RemembersAndLies(Remembers):
    """Says that its tokens were drawn evenly."""

    def propose(self, context, state, drawing):
        tokens = super().propose(context, state, drawing).tokens
        if drawing.logits_filter.is_greedy:
            return Draft(tokens)
        return Draft(tokens, torch.full((*tokens.shape, 6), 1 / 6))


@pytest.mark.parametrize("graphs", [False, True])
def test_declared_memory_of_earlier_requests_is_judged_by_the_law_alone(graphs):
    def report_of(drafter):
        generator = SpeculativeGenerator(tiny(TARGET), drafter(6), "rejection", graphs=graphs)
        return certify(generator, [PROMPT, [3]], **QUICK)

    sound = report_of(Remembers)
    assert sound.passed, sound
    assert sound.rows is None
    assert "rows: not compared, the drafter has memory of earlier requests" in str(sound)
    unsaid = report_of(RemembersUnsaid)
    assert not unsaid.rows.passed
    assert "has_memory = True declares it" in str(unsaid)
    assert unsaid.text.passed
    lying = report_of(RemembersAndLies)
    assert not lying.passed
    assert not lying.text.passed


def test_memory_is_true_or_false():
    drafter = PromptLookupDrafter(2)
    drafter.has_memory = "yes"
    with pytest.raises(TypeError, match="has_memory"):
        SpeculativeGenerator(tiny(TARGET), drafter)
