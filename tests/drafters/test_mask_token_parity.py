"""`MaskTokenDrafter` computes the published wirings: the logits of all draft tokens are those of
`mask_reference`, which has no cache and knows nothing of the package.

The text arrives as in the loop: a prompt in chunks, then blocks of an accepted prefix and one new
token, of another length in every row. What belongs to no row is NaN or an impossible id. In float64
the two agree to 1e-10, so nothing hides in rounding.
"""

from dataclasses import replace

import pytest
import torch
from drafter_table import CPU, check_probs, drive, fresh_state, loop_of, propose
from eagle_heads import stand_in, tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_heads import ALIGNMENTS, CORRECTED, VOCAB, WIDTH, WIRINGS, random_drafter, random_head
from mask_reference import draft_logits, draft_rows

from specdec import Tree
from specdec.drafters import MaskTokenDrafter
from specdec.types import Context

FLOAT64 = {"dtype": torch.float64}
HEADS = {name: random_head(config) for name, config in WIRINGS.items()}
TARGETS = {name: stand_in(config) for name, config in WIRINGS.items()}
seeds = st.integers(0, 2**32 - 1)


class Recorder:
    """The logits `[B, K, Vd]` of a drafter's last pass that predicted anything."""

    def __init__(self, head, monkeypatch):
        self._calls, correction = [], getattr(head, "correction", None)
        part, name = (head, "unembed") if correction is None else (correction, "forward")
        method = getattr(part, name)

        def call(*args):
            if correction is None or args[0] == 0:
                self._calls.clear()
            out = method(*args)
            self._calls.append(out if correction is None else out[0])
            return out

        monkeypatch.setattr(part, name, call)

    @property
    def logits(self):
        return torch.cat(self._calls, dim=1)


def drafts_of(name, seed, *, width=3, chunk_size=4, patch):
    """Yields (row's text, its features, what the head computed) for every proposal."""
    config, head = WIRINGS[name], HEADS[name]
    recorder = Recorder(head, patch)
    drafter = MaskTokenDrafter(head, TARGETS[name], width, proposal="sample")
    sizes = FLOAT64 | {"hidden_size": config.target_hidden_size}
    for loop, draft, _ in drive(drafter, seed, vocab_size=VOCAB, chunk_size=chunk_size, **sizes):
        for b, (text, count) in enumerate(zip(loop.rows, loop.num_new, strict=True)):
            reads = count > 0 or not config.feature_layers
            assert int(draft.num_valid[b]) == (width if reads else 0)
            if reads:
                check_probs(head, draft, b, recorder.logits[b])
                features = loop.table[b, : len(text) - 1] if config.feature_layers else None
                yield list(text), features, recorder.logits[b], draft.tokens[b].tolist()


@pytest.mark.parametrize("name", WIRINGS)
@settings(max_examples=4)
@given(seeds, st.integers(1, 5), st.integers(1, 9))
@torch.no_grad()
def test_every_draft_is_that_of_the_wiring_recomputed_without_cache(name, seed, width, chunk_size):
    checked, weights = 0, HEADS[name].state_dict()
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"width": width, "chunk_size": chunk_size}
        for text, features, seen, path in drafts_of(name, seed, patch=patch, **sizes):
            case = WIRINGS[name], weights, tables_of(TARGETS[name]), text, features, width, path
            torch.testing.assert_close(seen, draft_logits(*case), rtol=0, atol=1e-10)
            checked += 1
    assert checked >= 6


FAULTS = {
    "nothing": {},
    "features one position late": {"features": lambda f: f.roll(1, dims=0)},
    "features one position early": {"features": lambda f: f.roll(-1, dims=0)},
    "the last token is another": {"text": lambda t: [*t[:-1], (t[-1] + 1) % VOCAB]},
    "the first token is another": {"text": lambda t: [(t[0] + 1) % VOCAB, *t[1:]]},
    "masks one position late": {"late": 1},
    "rows sampled one late": {"first": 1},
    "rows sampled one early": {"first": -1},
    "masks see all": {"sees": lambda q, k: torch.ones_like(k <= q)},
    "masks see what precedes them": {"sees": lambda q, k: k <= q},
    "masks do not see each other": {"sees": lambda q, k: (k < q - 1) | (k == q)},
}
HARMLESS = {
    "p-eagle": {"masks see what precedes them", "the first token is another"},
    "pard": {"masks see what precedes them", "features one position late"}
    | {"features one position early"},
    "dflash": {"masks see all", "the first token is another"},
    "dspark": {"masks see all", "the first token is another"},
}
"""What makes no difference to a wiring: it is what it does, or it does not read it."""


CASES = [(name, fault) for name in HARMLESS for fault in FAULTS]
CASES.remove(("dspark", "rows sampled one early"))  # there is no row before the first


@pytest.mark.parametrize(("name", "fault"), CASES)
@torch.no_grad()
def test_each_usual_fault_would_show(name, fault, monkeypatch):
    """The negative controls: the reference with one fault is far from what the drafter computes."""
    config, weights, worst = WIRINGS[name], HEADS[name].state_dict(), 0.0
    options = dict(FAULTS[fault])
    change_text = options.pop("text", lambda text: text)
    change_features = options.pop("features", lambda features: features)
    for text, features, seen, _ in drafts_of(name, 3, patch=monkeypatch):
        if len(text) == 1:
            continue
        features = None if features is None else change_features(features)
        case = config, weights, tables_of(TARGETS[name]), change_text(text), features, 3
        worst = max(worst, (seen - draft_logits(*case, **options)).abs().max().item())
    is_harmless = fault == "nothing" or fault in HARMLESS[name]
    assert worst < 1e-10 if is_harmless else worst > 1e-2


@pytest.mark.parametrize("name", CORRECTED)
@torch.no_grad()
def test_later_tokens_depend_on_the_path_and_the_first_one_does_not(name, monkeypatch):
    """The negative control of corrections: a reference with another first token."""
    config, weights, worst = WIRINGS[name], HEADS[name].state_dict(), 0.0
    for text, features, seen, path in drafts_of(name, 3, patch=monkeypatch):
        case = config, weights, tables_of(TARGETS[name]), text, features, 3
        other = draft_logits(*case, [(path[0] + 1) % VOCAB, *path[1:]])
        torch.testing.assert_close(seen[0], other[0], rtol=0, atol=1e-10)
        worst = max(worst, (seen - other)[1:].nan_to_num(0, 9, 9).abs().max().item())
    assert worst > 1e-2


@pytest.mark.parametrize("name", [n for n in CORRECTED if CORRECTED[n].confidence])
@torch.no_grad()
def test_a_draft_ends_before_the_first_token_that_the_head_is_not_sure_of(name, monkeypatch):
    config, head, target, found = WIRINGS[name], HEADS[name], TARGETS[name], set()
    sizes = FLOAT64 | {"hidden_size": config.target_hidden_size}
    drafter = MaskTokenDrafter(head, target, 3, confidence_threshold=0.55)
    for loop, draft, _ in drive(drafter, 3, vocab_size=VOCAB, num_steps=9, **sizes):
        for b, (text, count) in enumerate(zip(loop.rows, loop.num_new, strict=True)):
            if count == 0:
                assert int(draft.num_valid[b]) == 0
                continue
            features = loop.table[b, : len(text) - 1]
            case = config, head.state_dict(), tables_of(target), list(text), features, 3
            rows = draft_rows(*case)
            if config.confidence == "markov":
                before = torch.tensor([text[-1], *draft.tokens[b, :2].tolist()])
                rows = torch.cat([rows, head.correction.markov_w1.weight[before]], dim=1)
            estimates = (
                rows @ head.confidence_head.weight[0] + head.confidence_head.bias
            ).sigmoid()
            sure = 0
            while sure < 3 and estimates[sure] >= 0.55:
                sure += 1
            assert int(draft.num_valid[b]) == sure
            found.add(sure)
    assert len(found) >= 3


@torch.no_grad()
def test_a_threshold_that_has_no_meaning_is_refused():
    head, target = HEADS["dspark, markov"], TARGETS["dspark, markov"]
    with pytest.raises(ValueError, match="needs a head with a confidence head"):
        random_drafter("dspark, rnn", confidence_threshold=0.5)
    with pytest.raises(ValueError, match="ends chains early, and tree= drafts trees"):
        MaskTokenDrafter(head, target, tree=Tree(4, 2), confidence_threshold=0.5)
    with pytest.raises(ValueError, match="confidence_threshold must be"):
        MaskTokenDrafter(head, target, confidence_threshold=1.5)


# K, and the end of the positions.


@pytest.mark.parametrize("name", [n for n in WIRINGS if WIRINGS[n].block_size is None])
@torch.no_grad()
def test_a_causal_head_proposes_the_same_first_tokens_for_any_k(name):
    """Masks after a row make no difference to it."""
    drafts = []
    for width in (1, 2, 5):
        drafter = random_drafter(name, width, proposal="sample")
        state = fresh_state(drafter, 1, VOCAB)
        size = WIRINGS[name].target_hidden_size
        loop = loop_of(drafter, [[3, 1, 4, 1]], hidden_size=size, **FLOAT64)
        loop.prefill(drafter, state, 8)
        drafts.append(propose(drafter, loop, state, {})[0])
    for draft in drafts[:2]:
        expected = drafts[2].probs[:, : draft.probs.shape[1]]
        torch.testing.assert_close(draft.probs, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ALIGNMENTS)
@torch.no_grad()
def test_rows_past_the_heads_positions_are_never_written_and_fewer_tokens_are_valid(name):
    """A text that grows into the limit: proposals are those of a head without one, as long as they
    last, and no slot at the limit is touched.
    """
    limit, width = 14, 3
    config = WIRINGS[name]
    head, target = random_head(replace(config, max_positions=limit)), stand_in(config)
    drafter = MaskTokenDrafter(head, target, width, proposal="sample")
    free = MaskTokenDrafter(random_head(config), target, width, proposal="sample")
    states = [fresh_state(d, 2, VOCAB) for d in (drafter, free)]
    for state in states:  # zeros could hide a write
        for buffer in (*state.cache.keys.values(), *state.cache.values.values()):
            buffer.fill_(5.0)
    loop = loop_of(drafter, [[3, 1, 4, 1, 5, 9], [2, 7, 1]], hidden_size=WIDTH, **FLOAT64)
    for d, state in zip((drafter, free), states, strict=True):
        loop.prefill(d, state, 4)
    first = config.rows.first_row - config.rows.shift + 1
    seen = set()
    for step in range(14):
        drafts = [propose(d, loop, s, {})[0] for d, s in zip((drafter, free), states, strict=True)]
        for b, row in enumerate(loop.rows):
            valid = int(drafts[0].num_valid[b])
            assert valid == min(max(limit - (len(row) - 1 + first), 0), width), step
            seen.add(valid)
            is_whole = config.block_size is None or len(row) - 1 + config.block_size <= limit
            if is_whole:
                torch.testing.assert_close(
                    drafts[0].probs[b, :valid], drafts[1].probs[b, :valid], rtol=0, atol=1e-10
                )
        loop.commit([[1 + step % 7], [2 + step % 5]])
    assert {0, 1, 2, 3} <= seen
    for buffer in (*states[0].cache.keys.values(), *states[0].cache.values.values()):
        assert bool((buffer[:, limit : states[0].cache.trash] == 5.0).all())


def test_a_block_bounds_how_many_tokens_are_drafted():
    config = WIRINGS["dflash"]
    head, target = random_head(config), stand_in(config)
    assert MaskTokenDrafter(head, target, 5).num_draft_tokens == 5
    with pytest.raises(ValueError, match="predict 5 tokens"):
        MaskTokenDrafter(head, target, 6)
    dspark = WIRINGS["dspark"]
    assert MaskTokenDrafter(random_head(dspark), target, 6).num_draft_tokens == 6


@pytest.mark.parametrize("name", ["p-eagle", "dflash"])
def test_a_context_without_features_or_with_others_is_refused(name):
    drafter = random_drafter(name)
    state = drafter.init_state(1, 20, vocab_size=VOCAB, device=CPU)
    one = torch.tensor([1])
    context = Context(torch.tensor([[3, 1]]), None, 0 * one, one, num_attended=4)
    with pytest.raises(ValueError, match="needs the target's features"):
        drafter.prefill(context, state)
    with pytest.raises(ValueError, match=r"was made for another target"):
        drafter.prefill(replace(context, features=torch.zeros(1, 1, 5)), state)
