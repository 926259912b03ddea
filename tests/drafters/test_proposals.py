"""Law 8, drafter honesty, where a `Proposal` alone decides it: for each data type, for several
tokens at once, for coupled draws and where nobody asks for probabilities. That tokens are drawn
from what comes with them is in `test_laws.py`.
"""

import pytest
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
from specdec.samplers import Drawing, LogitsFilter, Noise, draw_by_inversion, draw_by_race
from specdec.types import Context

K = 2
MODEL = build("llama", seed=3)


@torch.inference_mode()
def propose(drafter, gate, rows=2, **options):
    text = torch.tensor([[7, 3, 11, 5]]).expand(rows, -1)
    state = drafter.init_state(rows, 16, vocab_size=61, device=torch.device("cpu"))
    start, num_new = torch.zeros(rows, dtype=torch.long), torch.full((rows,), 3)
    drafter.prefill(Context(text[:, :3], None, start, num_new - 1), state)
    context = Context(text, None, start, num_new)
    noise = Noise(list(range(rows))).at(start + 3, drafter.num_draft_tokens + 1)
    return drafter.propose(
        context, state, drawing(drafter, LogitsFilter(rows, **gate), noise, **options)
    )


def test_the_draft_law_has_the_draft_temperature_and_the_targets_truncation():
    draft = propose(ModelDrafter(MODEL, 2, draft_temperature=0.5), {"top_k": 5}, rows=2)
    with torch.no_grad():
        logits = MODEL(torch.tensor([[7, 3, 11, 5]])).logits[:, -1:]
    expected = LogitsFilter(1, temperature=0.5, top_k=5)(logits)
    torch.testing.assert_close(draft.probs[:1, :1], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("gate", [{}, {"temperature": 0}, {"top_p": 0.6}], ids=str)
@pytest.mark.parametrize("kind", ["sample", "argmax"])
def test_laws_that_nobody_asks_for_are_not_made_and_the_tokens_stay(kind, gate):
    drafter = ModelDrafter(MODEL, K, proposal=kind)
    asked, unasked = (propose(drafter, gate, rows=9, wants_probs=asks) for asks in (True, False))
    assert unasked.probs is None
    assert torch.equal(asked.tokens, unasked.tokens)
    assert propose(drafter, gate, rule=draw_by_race, wants_probs=False).probs is None


@pytest.mark.parametrize("gate", [{}, {"top_p": 0.6}], ids=str)
@pytest.mark.parametrize("rule", [draw_by_inversion, draw_by_race])
@pytest.mark.parametrize("kind", ["sample", "argmax"])
def test_several_tokens_at_once_are_those_drawn_one_after_the_other(kind, rule, gate):
    generator = torch.Generator().manual_seed(0)
    logits, drafts = torch.randn(5, 4, 30, generator=generator), []
    for sizes in ((1, 1, 1, 1), (4,), (1, 3), (2, 2)):
        noise = Noise(list(range(5))).at(torch.arange(5), 5)
        drafting = Proposal(kind).begin(Drawing(4, LogitsFilter(5, **gate), noise, rule))
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
    logits_filter = LogitsFilter(3, temperature=[0.5, 0.0, 1.2], top_k=9)
    noise = Noise([1, 2, 3]).at(torch.zeros(3, dtype=torch.long), K + 1)
    drafting = Proposal().begin(Drawing(K, logits_filter, noise, draw_by_inversion))
    rows = [logits[:, i : i + 1] for i in range(K)]
    drawn = [
        draw_by_inversion(r, logits_filter, noise, i, wants_probs=True) for i, r in enumerate(rows)
    ]
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
    ids = torch.tensor([[5, 9, 2]]).expand(32, -1)
    options = dict(max_new_tokens=24, do_sample=True, temperature=1.5, top_k=8)
    lengths = [
        generator.generate(
            ids, draft_probs=told, seed=list(range(32)), **options
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
