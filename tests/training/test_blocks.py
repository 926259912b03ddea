"""Blocks that are trained are blocks that are drafted: the oracle is `mask_reference`, a head
recomputed row by row without a cache, and `MaskTokenDrafter` itself.
"""

from itertools import product

import pytest
import torch
from architectures import VOCAB, build
from drafting import drawing
from eagle_heads import FeatureLoop, features_and_logits, tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_heads import head_for
from mask_reference import draft_logits

from specdec import SpeculativeGenerator
from specdec.drafters import MaskTokenDrafter
from specdec.drafters.mask_token.correction import DominoConfig, MarkovConfig
from specdec.lab.training import BlockRollouts, MaskRollouts
from specdec.lab.training.divergences import tv
from specdec.lab.training.mask_token import new_head
from specdec.samplers import LogitsFilter, Noise

MODEL = build("llama", dtype=torch.float64)
PLAIN = [
    *("dflash", "dflash, own tables", "dflash, learned embedding", "dflash, causal"),
    *("dspark", "dspark, causal"),
]
CORRECTED = ["dspark, markov", "dspark, gated", "dspark, rnn", "dflash, rnn"]


def drafter_of(name, seed=0, **options):
    head = head_for(MODEL, name, seed=seed).double()
    count = min(4, head.config.max_draft_tokens or 4)
    return MaskTokenDrafter(head, MODEL, count, **options)


def random_ids(seed, rows, length):
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def reference(drafter, ids, features, last, count, *, off=0):
    """Logits `[K, Vd]` after the tokens of a row up to `last`."""
    weights, tables = drafter.head.state_dict(), tables_of(MODEL)
    known = ids[: last + 1].tolist(), features[off : last + off]
    path = (ids[last + 1 :].tolist() + [0] * count)[:count]
    options = {} if drafter.config.correction is None else {"path": path}
    return draft_logits(drafter.config, weights, tables, *known, count, **options)


@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=4)
@given(st.integers(0, 2**32 - 1), st.integers(3, 6))
@torch.no_grad()
def test_a_block_is_a_draft_after_its_anchor(name, seed, count):
    drafter = drafter_of(name, seed)
    depths = drafter.num_draft_tokens
    ids = random_ids(seed, 2, depths + count)
    features, _ = features_and_logits(MODEL, ids, drafter.feature_layers)
    objective = BlockRollouts(drafter, MODEL, depths, anchor_share=1.0)
    last = objective.draw_anchors(ids) + 1
    first = drafter.config.rows.first_row
    seen = drafter.logits(objective.roll_out(ids, features, last))[:, :, first : first + depths]
    off = []
    for row in range(2):
        for i, place in enumerate(last[row].tolist()):
            expected = reference(drafter, ids[row], features[row], place, depths)
            torch.testing.assert_close(seen[row, i], expected, rtol=0, atol=1e-9)
            wrong = reference(drafter, ids[row], features[row], place, depths, off=1)
            off.append((seen[row, i] - wrong).abs().max().item())
    assert max(off) > 1e-3  # the control: features one later predict something else


@pytest.mark.parametrize("loss", [None, tv])
@pytest.mark.parametrize(
    ("name", "rolled_out"), [("dflash", False), *product(CORRECTED, [False, True])]
)
@torch.no_grad()
def test_the_loss_is_that_of_drafts_after_every_anchor(name, loss, rolled_out):
    """By hand, anchor by anchor; with `rolled_out` a draft weighs the probability that the head
    gives to the text's own tokens before.
    """
    drafter, ids = drafter_of(name), random_ids(5, 2, 13)
    depths = drafter.num_draft_tokens
    options = {"rolled_out": rolled_out} | ({} if loss is None else {"loss": loss})
    objective = BlockRollouts(drafter, MODEL, depths, 1.0, 0.5, **options)
    features, teacher = features_and_logits(MODEL, ids, drafter.feature_layers)
    sums, shares = torch.zeros(2, depths, dtype=torch.float64)
    for row in range(2):
        for last in range(1, 13 - depths + 1):
            logits = reference(drafter, ids[row], features[row], last, depths)
            share = 1.0
            for m in range(depths):
                log_q, p = logits[m].log_softmax(-1), teacher[row, last + m].softmax(-1)
                far = -(p * log_q).sum() if loss is None else 0.5 * (p - log_q.exp()).abs().sum()
                sums[m] += share * far
                shares[m] += share
                if rolled_out and last + m + 1 < 13:
                    share *= log_q[ids[row, last + m + 1]].exp().item()
    weights = torch.tensor([0.5**m for m in range(depths)], dtype=torch.float64)
    expected = (weights * sums / shares).sum() / weights.sum()
    torch.testing.assert_close(objective(ids).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PLAIN)
@torch.no_grad()
def test_blocks_have_the_distributions_that_the_drafter_draws_from(name):
    drafter, length = drafter_of(name, proposal="sample"), 9
    depths = drafter.num_draft_tokens
    prompts = random_ids(1, 3, length)
    features, _ = features_and_logits(MODEL, prompts, drafter.feature_layers)
    loop = FeatureLoop(prompts.tolist(), 4, features)
    state = drafter.init_state(3, 20, vocab_size=VOCAB, device=torch.device("cpu"))
    loop.prefill(drafter, state, 4)
    noise = Noise([1, 2, 3]).at(torch.full((3,), length - 1), 5)
    draft = drafter.propose(loop.context(), state, drawing(drafter, LogitsFilter(3), noise))
    objective = BlockRollouts(drafter, MODEL, depths)
    outs = objective.roll_out(prompts, features, torch.full((3, 1), length - 1))
    first = drafter.config.rows.first_row
    logits = drafter.logits(outs[:, 0, first : first + depths])
    probs = drafter.head.over_target_ids(logits).softmax(dim=-1)
    torch.testing.assert_close(draft.probs.double(), probs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("block", "correction"),
    [
        (("same-position", 4), None),
        (("next-token", 3), MarkovConfig(8)),
        (("next-token", 3), DominoConfig(8, 8)),
    ],
)
def test_a_new_head_learns_and_drafts(block, correction):
    model = build("llama", dtype=torch.float32)
    drafter = MaskTokenDrafter(new_head(model, block=block, correction=correction), model, 3)
    objective = BlockRollouts(drafter, model, anchor_share=0.5)
    prompt = random_ids(3, 8, 4)
    plain = SpeculativeGenerator(model, None).generate(prompt, max_new_tokens=20)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=3e-3)

    def accepted():
        found = SpeculativeGenerator(model, drafter).generate(prompt, max_new_tokens=20)
        assert found.sequences.equal(plain.sequences)
        return sum(step.num_accepted for row in found.steps for step in row)

    before, losses = accepted(), []
    for _ in range(60):
        loss = objective(plain.sequences)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert accepted() > before + 10
    assert all(weight.grad is None for weight in model.parameters())


def test_what_blocks_cannot_train_is_refused():
    shifted = MaskTokenDrafter(head_for(MODEL, "p-eagle").double(), MODEL, 4)
    with pytest.raises(ValueError, match="BlockRollouts trains heads of alignment 'same-position'"):
        BlockRollouts(shifted, MODEL)
    with pytest.raises(ValueError, match="MaskRollouts trains heads of alignment 'shifted', got"):
        MaskRollouts(drafter_of("dflash"), MODEL)
    most = drafter_of("dflash").config.max_draft_tokens
    with pytest.raises(ValueError, match=f"predicts {most} tokens, got num_depths={most + 1}"):
        BlockRollouts(drafter_of("dflash"), MODEL, most + 1)
    with pytest.raises(ValueError, match="rolled_out weighs what a correction reads"):
        BlockRollouts(drafter_of("dflash"), MODEL, rolled_out=True)
