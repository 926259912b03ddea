"""Law 8, drafter honesty, where a `Proposal` alone decides it: under every filter and draft
temperature, for each data type, for several tokens at once, and for coupled draws. What every
drafter makes of it is in `test_laws.py`.

alpha = 1e-9 for each test; 6000 draws detect a total variation of 0.08 over 8 tokens with power
0.99. The negative controls are the field's classical mismatches.
"""

import pytest
import scipy.stats
import torch
from architectures import build
from drafting import drawing, perturbed

from specdec import (
    EnsembleSampler,
    ModelDrafter,
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


@pytest.mark.parametrize(
    ("gate", "draft_temperature"),
    [*((gate, None) for gate in GATES), ("plain", 0.4), ("top-k", 2.5)],
)
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


@pytest.mark.parametrize("gate", [{}, {"top_p": 0.6}], ids=str)
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


def test_draft_probs_raise_acceptance():
    target = build("llama")
    generator = SpeculativeGenerator(target, ModelDrafter(perturbed(target, scale=0.3), 4))
    ids = torch.tensor([[5, 9, 2]]).expand(64, -1)
    options = dict(max_new_tokens=24, do_sample=True, temperature=1.5, top_k=8)
    lengths = [
        generator.generate(
            ids, draft_probs=told, seed=list(range(64)), **options
        ).stats.acceptance_length
        for told in (True, False)
    ]
    assert lengths[0] > lengths[1] + 0.1


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
