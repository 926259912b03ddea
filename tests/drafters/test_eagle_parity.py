"""`EagleDrafter` computes the published wiring: logits and feedback of every draft step are those
of `eagle_reference`, which has no cache and knows nothing of the package.

The text arrives as in the loop: a prompt in chunks, then blocks of an accepted prefix and one new
token, of another length in every row. What belongs to no row is NaN or an impossible id. In float64
the two agree to 1e-10, so nothing hides behind rounding.
"""

import pytest
import torch
from architectures import build
from drafter_table import check_probs, drive
from drafting import ragged_prompts
from eagle_heads import (
    EAGLE3,
    VOCAB,
    WIRINGS,
    features_and_logits,
    flagged,
    head_for,
    random_head,
    stand_in,
    tables_of,
)
from eagle_reference import draft_outputs
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import SpeculativeGenerator
from specdec.drafters import EagleDrafter

HEADS = {name: random_head(config) for name, config in WIRINGS.items()}
TARGETS = {name: stand_in(config) for name, config in WIRINGS.items()}
seeds = st.integers(0, 2**32 - 1)


class Recorder:
    """What a head computes while it drafts: `[B, 1, ...]` per pass."""

    def __init__(self, head, monkeypatch):
        self.logits, self.feedback = [], []
        for seen, name in ((self.logits, "logits"), (self.feedback, "feedback")):
            monkeypatch.setattr(head, name, self._recorded(getattr(head, name), seen))

    @staticmethod
    def _recorded(method, seen):
        def call(*args):
            seen.append(method(*args))
            return seen[-1]

        return call

    def take(self, row):
        """Logits `[K, Vd]` and feedback `[K - 1, H]` of a row."""
        logits, feedback = (
            torch.cat([x[row] for x in seen]) if seen else torch.empty(0)
            for seen in (self.logits, self.feedback)
        )
        return logits, feedback

    def clear(self):
        self.logits.clear()
        self.feedback.clear()


def largest_difference(seen, expected):
    """Between recorded (logits, feedback) and the reference's, whose last feedback nobody needs."""
    pairs = zip(seen, (expected[0], expected[1][:-1]), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs if b.numel())


def drafts_of(config, head, target, seed, *, width=3, chunk_size=4, dtype=torch.float64, recorder):
    """Yields (row's text, its features, its draft, what the head computed) for every proposal."""
    drafter = EagleDrafter(head, target, width)
    sizes = {"vocab_size": VOCAB, "hidden_size": config.target_hidden_size, "dtype": dtype}
    for loop, draft, _ in drive(drafter, seed, chunk_size=chunk_size, **sizes):
        for b, (text, count) in enumerate(zip(loop.rows, loop.num_new, strict=True)):
            assert int(draft.num_valid[b]) == (width if count else 0)
            if count:
                seen = recorder.take(b)
                check_probs(head, draft, b, seen[0])
                yield list(text), loop.table[b, : len(text) - 1], draft.tokens[b], seen
        recorder.clear()


@pytest.mark.parametrize("name", WIRINGS)
@settings(max_examples=4)
@given(seeds, st.integers(1, 5), st.integers(1, 9))
@torch.no_grad()
def test_every_draft_step_is_that_of_the_wiring_recomputed_without_cache(
    name, seed, width, chunk_size
):
    head, target, config = HEADS[name], TARGETS[name], WIRINGS[name]
    with pytest.MonkeyPatch.context() as patch:
        recorder, checked = Recorder(head, patch), 0
        options = {"width": width, "chunk_size": chunk_size, "recorder": recorder}
        for text, features, drafted, seen in drafts_of(config, head, target, seed, **options):
            expected = draft_outputs(
                config, head.state_dict(), tables_of(target), text, features, drafted.tolist()
            )
            assert seen[0].shape == (width, config.draft_vocab_size)
            assert largest_difference(seen, expected) < 1e-10
            checked += 1
        assert checked >= 6


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "three layers"])
@torch.no_grad()
def test_in_float32_it_is_to_1e_5(name, monkeypatch):
    config = WIRINGS[name]
    head = random_head(config, dtype=torch.float32)
    target = stand_in(config, dtype=torch.float32)
    recorder, exact = Recorder(head, monkeypatch), HEADS[name].state_dict()
    options = {"dtype": torch.float32, "recorder": recorder}
    for text, features, drafted, seen in drafts_of(config, head, target, 7, **options):
        tables = [table.double() for table in tables_of(target)]
        expected = draft_outputs(config, exact, tables, text, features.double(), drafted.tolist())
        assert largest_difference(seen, expected) < 1e-5


def swapped(weights, one, other):
    """The weights with two tensors exchanged."""
    return weights | {one: weights[other], other: weights[one]}


def with_halves_exchanged(weights, names):
    return weights | {n: torch.cat(weights[n].chunk(2, dim=1)[::-1], dim=1) for n in names}


FUSED = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
NORMS = "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"
FAULTS = {
    "nothing": lambda c: c,
    "features one position late": lambda c: c | {"features": c["features"].roll(1, dims=0)},
    "features one position early": lambda c: c | {"features": c["features"].roll(-1, dims=0)},
    "tokens beside their own features": lambda c: c | {"text": [0, *c["text"][:-1]]},
    "draft rows stay where they are": lambda c: (
        c | {"positions": [*range(len(c["text"]) - 1), *[len(c["text"]) - 2] * 9]}
    ),
    "draft rows one position late": lambda c: (
        c | {"positions": [*range(len(c["text"]) - 1), *range(len(c["text"]), 60)]}
    ),
    "positions count down": lambda c: c | {"positions": list(range(60, 0, -1))},
    "normalised feedback": lambda c: c | {"config": flagged(c["config"], feedback_norm=True)},
    "norm before the residual": lambda c: (
        c | {"config": flagged(c["config"], norm_before_residual=True)}
    ),
    "no output norm": lambda c: c | {"config": flagged(c["config"], output_norm=False)},
    "other rope base": lambda c: (
        c | {"config": flagged(c["config"], rope=WIRINGS["rope base"].layer.rope)}
    ),
    "other rope scaling": lambda c: (
        c | {"config": flagged(c["config"], rope=WIRINGS["rope linear"].layer.rope)}
    ),
    "logits scaled": lambda c: c | {"config": flagged(c["config"], logit_scale=0.5)},
    "other eps": lambda c: c | {"config": flagged(c["config"], rms_norm_eps=0.1)},
    "norms exchanged": lambda c: c | {"weights": swapped(c["weights"], *NORMS)},
    "hidden before embedding": lambda c: (
        c | {"weights": with_halves_exchanged(c["weights"], FUSED)}
    ),
    "features in another order": lambda c: (
        c | {"features": torch.cat(c["features"].chunk(3, dim=1)[::-1], dim=1)}
    ),
    "keys and values exchanged": lambda c: (
        c | {"weights": swapped(c["weights"], FUSED[1], FUSED[2])}
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@torch.no_grad()
def test_each_usual_fault_would_show(fault, monkeypatch):
    """The negative controls: the reference with one fault is far from what the drafter computes."""
    head, target = HEADS["eagle3"], TARGETS["eagle3"]
    recorder, worst = Recorder(head, monkeypatch), 0.0
    for text, features, drafted, seen in drafts_of(EAGLE3, head, target, 3, recorder=recorder):
        case = {"config": EAGLE3, "weights": head.state_dict(), "features": features, "text": text}
        case = FAULTS[fault](case | {"tables": tables_of(target), "drafted": drafted.tolist()})
        worst = max(worst, largest_difference(seen, draft_outputs(**case)))
    assert worst < 1e-10 if fault == "nothing" else worst > 1e-2


def run_behind_a_target(model, drafter, recorder, steps=4):
    """Yields (row's text, draft, what the head computed) of a generation."""
    ids, mask = ragged_prompts(model.config.vocab_size, 7, 1, 4)
    generator = SpeculativeGenerator(model, drafter, prefill_chunk_size=3)
    state = generator.start(ids, mask, max_new_tokens=40, eos_token_id=None, do_sample=True, seed=3)
    for _ in range(steps):
        recorder.clear()
        texts = [row[:n].tolist() for row, n in zip(state.tokens, state.lengths, strict=True)]
        draft = generator.step(state).draft
        for b, text in enumerate(texts):
            if len(text) > 1:
                yield text, draft.tokens[b].tolist(), recorder.take(b)


@pytest.mark.parametrize(
    ("kind", "shift"), [("attention", 0), ("attention", 1), ("attention", -1), ("input", 0)]
)
@torch.inference_mode()
def test_features_are_those_of_hfs_plain_forward_at_the_boundaries_named(kind, shift, monkeypatch):
    """The whole loop behind a Llama; with boundaries off by one the same check fails."""
    model = build("llama")
    layers = (1, 2) if kind == "attention" else ("final",)
    head = head_for(model, kind=kind, feature_layers=layers)
    recorder, worst = Recorder(head, monkeypatch), 0.0
    drafter = EagleDrafter(head, model, 3)
    for text, drafted, seen in run_behind_a_target(model, drafter, recorder):
        features = features_and_logits(model, torch.tensor([text[:-1]]), layers, shift)[0][0]
        expected = draft_outputs(
            head.config, head.state_dict(), tables_of(model), text, features, drafted
        )
        worst = max(worst, largest_difference(seen, expected))
    assert worst < 1e-4 if shift == 0 else worst > 1e-2


def test_a_target_in_half_precision_takes_a_head_in_float32():
    model = build("llama", dtype=torch.bfloat16)
    head = head_for(build("llama"), has_lm_head=False)
    ids, mask = ragged_prompts(model.config.vocab_size, 7, 1, 4)
    generator = SpeculativeGenerator(model, EagleDrafter(head, model, 3))
    result = generator.generate(ids, mask, max_new_tokens=8, do_sample=True, seed=1)
    assert result.lengths == [8] * 3
