"""Law 8, drafter honesty: draft tokens are draws from the law that the sampler is told.

Tokens and law come out of one call (`draw_by_inversion`), and that they agree is tested from
outside: many rows with one context and different seeds, every place of the draft, a chi-square
against `Draft.probs`. alpha = 1e-9 for each of about 50 tests; 6000 draws detect a total variation
of 0.08 over 8 tokens with power 0.99. The negative controls are the field's classical mismatches.
"""

import pytest
import scipy.stats
import torch
from architectures import build
from drafting import drawing, perturbed

from specdec import (
    EnsembleSampler,
    ModelDrafter,
    PromptLookupDrafter,
    SpeculativeGenerator,
    TypicalSampler,
)
from specdec.drafters.proposal import Proposal
from specdec.samplers import Drawing, Noise, Warp, draw_by_inversion, draw_by_race
from specdec.types import Context, Draft

ROWS, K, ALPHA = 6000, 2, 1e-9
MODEL = build("llama", seed=3)
GATES = {
    "plain": {},
    "sharp": {"temperature": 0.5},
    "flat": {"temperature": 2.0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.3, "temperature": 1.5},
}


@torch.inference_mode()
def propose(drafter, gate, rows=ROWS, **options):
    text = torch.tensor([[7, 3, 11, 5]]).expand(rows, -1)
    state = drafter.init_state(rows, 16, vocab_size=61, device=torch.device("cpu"))
    start, num_new = torch.zeros(rows, dtype=torch.long), torch.full((rows,), 3)
    drafter.prefill(Context(text[:, :3], None, start, num_new - 1, num_attended=3), state)
    context = Context(text, None, start, num_new, num_attended=4 + drafter.num_draft_tokens)
    noise = Noise(list(range(rows))).at(start + 3, drafter.num_draft_tokens + 1)
    return drafter.propose(context, state, drawing(drafter, Warp(rows, **gate), noise, **options))


def p_values(draft: Draft):
    """Of the first draft token, and of the second behind the three most frequent first ones."""
    yield chi_square(draft.tokens[:, 0], draft.probs[0, 0])
    for first in draft.tokens[:, 0].bincount().argsort(descending=True)[:3].tolist():
        behind = draft.tokens[:, 0] == first
        yield chi_square(draft.tokens[behind, 1], draft.probs[behind][0, 1])


def chi_square(tokens, law) -> float:
    """Tail of Pearson's statistic; cells that expect fewer than 10 are one cell."""
    seen = tokens.bincount(minlength=len(law)).double()
    expected = law.double() * len(tokens)
    if (seen[law == 0] > 0).any():
        return 0.0
    big = expected >= 10
    cells = [x[~big].sum()[None] for x in (seen, expected)]
    seen, expected = (torch.cat([x[big], c]) for x, c in zip((seen, expected), cells, strict=True))
    seen, expected = seen[expected > 0], expected[expected > 0]
    statistic = ((seen - expected) ** 2 / expected).sum().item()
    return 1.0 if len(seen) == 1 else float(scipy.stats.chi2.sf(statistic, len(seen) - 1))


@pytest.mark.parametrize("draft_temperature", [None, 0.4, 1.0, 2.5])
@pytest.mark.parametrize("gate", GATES)
def test_draft_tokens_are_draws_from_the_law_that_is_told(gate, draft_temperature):
    drafter = ModelDrafter(MODEL, K, draft_temperature=draft_temperature)
    draft = propose(drafter, GATES[gate])
    assert torch.allclose(draft.probs.sum(-1), torch.ones(()), atol=1e-5)
    for p in p_values(draft):
        assert p > ALPHA


@pytest.mark.parametrize("told", ["another temperature", "without the filter", "shifted row"])
def test_a_law_that_is_not_the_one_drawn_from_is_found_out(told):
    draft = propose(ModelDrafter(MODEL, K), {"top_k": 5})
    wrong = {
        "another temperature": propose(ModelDrafter(MODEL, K, draft_temperature=0.4), {"top_k": 5}),
        "without the filter": propose(ModelDrafter(MODEL, K), {}),
        "shifted row": Draft(draft.tokens, draft.probs.flip(1)),
    }[told]
    assert min(p_values(Draft(draft.tokens, wrong.probs))) < ALPHA


def test_the_draft_law_has_the_draft_temperature_and_the_targets_truncation():
    draft = propose(ModelDrafter(MODEL, 1, draft_temperature=0.5), {"top_k": 5}, rows=2)
    with torch.no_grad():
        logits = MODEL(torch.tensor([[7, 3, 11, 5]])).logits[:, -1:]
    expected = Warp(1, temperature=0.5, top_k=5)(logits)
    torch.testing.assert_close(draft.probs[:1], expected, rtol=0, atol=1e-6)


def test_an_argmax_proposal_is_a_point_mass_on_the_most_likely_tokens():
    draft = propose(ModelDrafter(MODEL, K, proposal="argmax"), {"temperature": 1.5}, rows=3)
    greedy = propose(ModelDrafter(MODEL, K), {"temperature": 0}, rows=3)
    assert draft.probs is None
    assert greedy.probs is None
    assert torch.equal(draft.tokens, greedy.tokens)


def test_greedy_rows_propose_their_most_likely_tokens_also_at_a_draft_temperature():
    gate = {"temperature": [0.0, 1.0, 0.0]}
    draft = propose(ModelDrafter(MODEL, K, draft_temperature=3.0), gate, rows=3)
    greedy = propose(ModelDrafter(MODEL, K), {"temperature": 0}, rows=3)
    assert torch.equal(draft.tokens[::2], greedy.tokens[::2])
    assert draft.probs[::2].amax(-1).eq(1).all()


def test_coupled_draws_come_without_probabilities():
    draft = propose(ModelDrafter(MODEL, K), {}, rule=draw_by_race, wants_probs=False)
    assert draft.probs is None
    law = propose(ModelDrafter(MODEL, 1), {}, rows=1).probs[0, 0]
    assert chi_square(draft.tokens[:, 0], law) > ALPHA


@pytest.mark.parametrize("gate", [{}, {"temperature": 0}, {"top_p": 0.6}], ids=str)
@pytest.mark.parametrize("kind", ["sample", "argmax"])
def test_laws_that_nobody_asks_for_are_not_made_and_the_tokens_stay(kind, gate):
    drafter = ModelDrafter(MODEL, K, proposal=kind)
    asked, unasked = (propose(drafter, gate, rows=9, wants_probs=asks) for asks in (True, False))
    assert unasked.probs is None
    assert torch.equal(asked.tokens, unasked.tokens)


@pytest.mark.parametrize("gate", [{}, {"temperature": 0}, {"top_p": 0.6}], ids=str)
@pytest.mark.parametrize("rule", [draw_by_inversion, draw_by_race])
@pytest.mark.parametrize("kind", ["sample", "argmax"])
def test_several_tokens_at_once_are_those_drawn_one_after_the_other(kind, rule, gate):
    generator = torch.Generator().manual_seed(0)
    logits, drafts = torch.randn(5, 4, 30, generator=generator), []
    for sizes in ((1, 1, 1, 1), (4,), (1, 3), (2, 2)):
        noise = Noise(list(range(5))).at(torch.arange(5), 5)
        drafting = Proposal(kind).begin(Drawing(4, Warp(5, **gate), noise, rule))
        for piece in logits.split(sizes, dim=1):
            assert drafting.draw(piece).shape == piece.shape[:2]
        drafts.append(drafting.end())
    for draft in drafts[1:]:
        assert draft.tokens.equal(drafts[0].tokens)
        assert (draft.probs is None) == (drafts[0].probs is None)
        if draft.probs is not None:
            assert draft.probs.equal(drafts[0].probs)


def counted(method, calls):
    def call(*args):
        calls.append(method.__name__)
        return method(*args)

    return call


@pytest.mark.parametrize("is_told", [True, False])
def test_a_run_makes_laws_where_they_are_told_only(is_told, monkeypatch):
    calls = []
    for name in ("draw", "choose"):
        monkeypatch.setattr(Warp, name, counted(getattr(Warp, name), calls))
    target = build("llama")
    generator = SpeculativeGenerator(target, ModelDrafter(target, 3))
    ids = torch.tensor([[5, 9, 2]])
    generator.generate(ids, max_new_tokens=8, do_sample=True, seed=1, draft_probs=is_told)
    assert set(calls) == {"draw" if is_told else "choose"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_law_is_written_where_the_draft_keeps_it(dtype):
    logits = torch.randn(3, K, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    warp = Warp(3, temperature=[0.5, 0.0, 1.2], top_k=9)
    noise = Noise([1, 2, 3]).at(torch.zeros(3, dtype=torch.long), K + 1)
    drafting = Proposal().begin(Drawing(K, warp, noise, draw_by_inversion))
    rows = [logits[:, i : i + 1] for i in range(K)]
    drawn = [draw_by_inversion(r, warp, noise, i, wants_probs=True) for i, r in enumerate(rows)]
    for row, (tokens, _) in zip(rows, drawn, strict=True):
        assert torch.equal(drafting.draw(row), tokens)
    draft = drafting.end()
    laws = torch.cat([probs for _, probs in drawn], dim=1)
    assert torch.equal(draft.probs, laws)
    assert draft.probs.dtype == laws.dtype
    assert draft.probs.is_contiguous()


def test_lookup_proposals_are_point_masses():
    draft = propose(PromptLookupDrafter(K), {}, rows=2)
    assert draft.probs is None


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_draft_probs_raise_acceptance_and_their_absence_is_lossless_too(temperature):
    target = build("llama")
    generator = SpeculativeGenerator(target, ModelDrafter(perturbed(target, scale=0.3), 4))
    ids = torch.tensor([[5, 9, 2]]).expand(64, -1)
    options = dict(max_new_tokens=24, do_sample=True, temperature=temperature, top_k=8)
    lengths = [
        generator.generate(
            ids, draft_probs=told, seed=list(range(64)), **options
        ).stats.acceptance_length
        for told in (True, False)
    ]
    assert lengths[0] > lengths[1] + 0.1


def test_a_proposal_says_what_it_is():
    assert repr(Proposal("sample", 0.5)) == "Proposal(kind='sample', temperature=0.5)"


@pytest.mark.parametrize("told", [True, False])
def test_greedy_rows_of_a_lossy_mixture_are_exact_beside_sampled_rows(told):
    target = build("llama")
    drafter = ModelDrafter(perturbed(target, scale=0.5), 3)
    ids = torch.tensor([[5, 9, 2], [5, 9, 2]])
    for sampler in (EnsembleSampler(0.3), TypicalSampler()):
        generator = SpeculativeGenerator(target, drafter, sampler)
        options = dict(do_sample=True, temperature=[0.0, 1.0], seed=1, draft_probs=told)
        mixed = generator.generate(ids, max_new_tokens=24, **options).sequences[0]
        assert torch.equal(mixed, target.generate(ids, max_new_tokens=24, do_sample=False)[0])
