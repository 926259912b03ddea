"""`Drafter.learn`: what a drafter that asks gets to know of a step that is over. The oracle is a
plain forward of the target over each path of the window.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from architectures import VOCAB
from diagonal import diagonal
from drafter_table import MODEL, make
from drafting import perturbed, ragged_prompts
from text_laws import ALPHA, TARGET, p_values_of_texts, sample, tiny

from specdec import (
    CouplingSampler,
    FirstMatch,
    ModelDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    Stream,
    Tree,
    WrappedDrafter,
)
from specdec.drafters.check import check_drafter
from specdec.drafters.plain import NoDrafter
from specdec.drafters.proposal import Proposal
from specdec.graphs.rows import map_tensors

IDS, MASK = ragged_prompts(VOCAB, 5, 1, 9)


class Recorder(WrappedDrafter):
    """Keeps all that it is told."""

    reads_outcome = True

    def __init__(self, inner):
        super().__init__(inner)
        self.told = []

    def learn(self, verified, state):
        super().learn(verified, state)
        self.told.append(map_tensors(torch.clone, verified))


def windows(generation, before, verified):
    """Per row of the batch and row of its window, the text up to and with it."""
    for row, length in enumerate(before):
        text = generation.tokens[row, :length].tolist()
        paths = [text]
        for node, parent in enumerate(verified.draft.window_parents[row].tolist()):
            paths.append([*paths[parent], int(verified.draft.tokens[row, node])])
        yield row, paths


@pytest.mark.parametrize(
    ("name", "graphs"),
    diagonal(["model", "lookup", "model, tree", "eagle3", "lookup, tree"], [False, True]),
)
@torch.no_grad()
def test_a_drafter_learns_the_logits_of_all_rows_of_the_window_and_the_verdict(name, graphs):
    drafter = Recorder(make(name))
    generator = SpeculativeGenerator(MODEL, drafter, graphs=graphs)
    options = {"max_new_tokens": 9, "do_sample": True, "seed": [1, 2, 3], "eos_token_id": None}
    generation = generator.start(IDS, MASK, **options)
    num_rejected = 0
    while not generation.has_ended.all():
        before, ended = generation.lengths.tolist(), generation.has_ended.tolist()
        drafter.told.clear()
        outcome = generator.step(generation)
        (verified,) = drafter.told
        assert verified.num_new[:3].equal(generation.lengths - torch.tensor(before))
        for index, paths in windows(generation, before, verified):
            if ended[index]:
                assert verified.num_new[index] == 0
                continue
            assert verified.root[index] == paths[0][-1]
            for node, path in enumerate(paths):
                expected = MODEL(torch.tensor([path])).logits[0, -1]
                torch.testing.assert_close(verified.output.logits[index, node], expected)
            step = outcome.fetch().read()[index]
            new = generation.tokens[index, before[index] : before[index] + len(step.new_tokens)]
            assert step.new_tokens == new.tolist()
            last = before[index] + len(step.new_tokens) == generation.tokens.shape[1]
            accepted = verified.verdict.num_accepted[index]
            if len(step.new_tokens) == accepted + 1 and not last:
                assert verified.extra[index] == step.new_tokens[-1]
                assert paths[verified.end[index]][before[index] :] == step.new_tokens[:-1]
            rejected = verified.is_rejected[index].nonzero()[:, 0].tolist()
            count = verified.draft.is_valid[index].sum()
            for node in rejected:  # children of the path's end, and none is the token that came
                assert paths[node + 1][:-1] == paths[verified.end[index]]
                num_rejected += 1
            if verified.draft.is_chain:
                assert len(rejected) == (accepted < count)
    assert num_rejected > 3


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_shorter_drafts_and_none_are_learnt_too(asked):
    drafter = Recorder(make("model"))
    generator = SpeculativeGenerator(MODEL, drafter)
    generator.generate(IDS, MASK, max_new_tokens=5, num_draft_tokens=asked, eos_token_id=None)
    for verified in drafter.told:
        assert verified.draft.tokens.shape[1] == asked
        assert verified.output.logits.shape[1] == asked + 1
        assert verified.is_rejected.shape[1] == asked


def test_a_verdict_that_is_out_of_range_is_learnt_in_range_and_found_afterwards():
    class Wrong(RejectionSampler):
        def accept(self, draft, target_logits, logits_filter, noise):
            verdict = super().accept(draft, target_logits, logits_filter, noise)
            return replace(verdict, num_accepted=verdict.num_accepted + 99)

    drafter = Recorder(make("model"))
    generator = SpeculativeGenerator(MODEL, drafter, Wrong())
    with pytest.raises(ValueError, match="accepted fewer than 0 tokens or more than were drafted"):
        generator.generate(IDS, MASK, max_new_tokens=5, do_sample=True, seed=[1, 2, 3])
    assert drafter.told[0].verdict.num_accepted.max() == 4
    assert drafter.told[0].extra.shape == (3,)


@dataclass
class Learnt:
    """Of `Adaptive`."""

    inner: Any
    bias: torch.Tensor  # [B, V]


class Adaptive(WrappedDrafter):
    """Makes what was rejected less likely, and what came in its place more so."""

    reads_outcome, rate = True, 1.0

    def init_state(self, rows, max_length, *, vocab_size, device):
        inner = super().init_state(rows, max_length, vocab_size=vocab_size, device=device).inner
        return Learnt(inner, torch.zeros(rows, vocab_size, device=device))

    def propose(self, context, state, drawing):
        biased = drawing.with_edit(lambda logits: logits + state.bias[:, None])
        return super().propose(context, state, biased)

    def learn(self, verified, state):
        wrong = self.rate * verified.is_rejected.to(state.bias)
        state.bias.mul_(0.9).scatter_add_(1, verified.draft.tokens, -wrong)
        extra = verified.extra[:, None].clamp(min=0)
        state.bias.scatter_add_(1, extra, wrong.amax(1, keepdim=True))


class Peeking(WrappedDrafter):
    """The fault: a draft that goes by the draws that are to accept it."""

    def propose(self, context, state, drawing):
        is_easy = drawing.noise.uniform(Stream.ACCEPT)[:, :1, None] < 0.5

        def edit(logits):
            return torch.where(is_easy, logits, -logits)

        return super().propose(context, state, drawing.with_edit(edit))


SMALL_TREE = Tree(nodes=4, depth=2, top_k=2, rates=(0.5, 0.4))
SHAPES = {"chain": {"num_draft_tokens": 2}, "tree": {"tree": SMALL_TREE}}


def of_tiny(kind, shape):
    proposal = "argmax" if kind is Peeking else "sample"
    return kind(ModelDrafter(perturbed(tiny(TARGET)), proposal=proposal, **SHAPES[shape]))


@pytest.mark.parametrize(
    ("shape", "sampler"),
    diagonal(SHAPES, ["auto", RejectionSampler(), CouplingSampler()]),
    ids=str,
)
def test_texts_have_the_targets_distribution_whatever_was_learnt(shape, sampler):
    """Law 2: what is learnt of step t is used from step t + 1 on, whose draws are new."""
    result = sample(of_tiny(Adaptive, shape), sampler, "plain", 2500)
    for length, p in p_values_of_texts(result, "plain").items():
        assert p > ALPHA, f"texts of {length} tokens"
    other = sample(of_tiny(Recorder, shape), sampler, "plain", 2500)
    drafts = [[step.draft_tokens for row in r.steps for step in row] for r in (result, other)]
    assert drafts[0] != drafts[1]  # something was learnt


@pytest.mark.parametrize("shape", SHAPES)
def test_a_drafter_that_peeks_at_the_draws_of_the_next_step_fails(shape):
    result = sample(of_tiny(Peeking, shape), "auto", "plain", 2500)
    assert min(p_values_of_texts(result, "plain").values()) < ALPHA


@pytest.mark.parametrize("name", ["model", "eagle3", "model, tree"])
def test_a_captured_step_learns_as_an_eager_one_and_a_row_as_alone(name):
    options = {"max_new_tokens": 16, "do_sample": True, "eos_token_id": None}
    eager, captured = (
        SpeculativeGenerator(MODEL, Adaptive(make(name)), graphs=graphs) for graphs in (0 > 1, True)
    )
    result = eager.generate(IDS, MASK, seed=[1, 2, 3], **options)
    again = captured.generate(IDS, MASK, seed=[1, 2, 3], check=True, **options)
    steps = [[[vars(step) for step in row] for row in r.steps] for r in (result, again)]
    assert steps[0] == steps[1]
    for row in range(3):
        own = IDS[row : row + 1, MASK[row] > 0]
        alone = eager.generate(own, seed=[row + 1], **options)
        assert [vars(step) for step in alone.steps[0]] == steps[0][row]


def test_drafters_that_are_joined_learn_of_the_draft_whoever_proposed_it():
    recorder, other = Recorder(make("eagle3")), Recorder(make("mtp"))
    joined = FirstMatch(PromptLookupDrafter(4, min_ngram=2), recorder, other)
    assert joined.reads_outcome
    assert not FirstMatch(PromptLookupDrafter(4), make("mtp")).reads_outcome
    generator = SpeculativeGenerator(MODEL, joined)
    result = generator.generate(IDS, MASK, max_new_tokens=9, eos_token_id=None)
    plain = SpeculativeGenerator(MODEL, None).generate(IDS, MASK, max_new_tokens=9)
    assert result.sequences.equal(plain.sequences)
    for drafter in (recorder, other):
        assert len(drafter.told) == max(map(len, result.steps))
        layers = drafter.feature_layers
        assert drafter.told[0].output.features.shape == (3, 5, 32 * len(layers))
    states = MODEL(IDS[2:], output_hidden_states=True).hidden_states
    layers = recorder.feature_layers
    expected = torch.cat([states[layer] for layer in layers], dim=2)[0, -1]
    torch.testing.assert_close(recorder.told[0].output.features[2, 0], expected)


class Silent(NoDrafter):
    reads_outcome = True


def test_who_asks_has_to_listen_and_the_flag_is_a_flag():
    with pytest.raises(TypeError, match=r"Silent has no method learn\(verified, state\)"):
        SpeculativeGenerator(MODEL, Silent())
    drafter = make("model")
    drafter.reads_outcome = 1
    with pytest.raises(TypeError, match="reads_outcome must be True or False, got 1"):
        check_drafter(drafter)
    assert Proposal().edit is None
