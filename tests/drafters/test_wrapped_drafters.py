"""`WrappedDrafter` drafts as the drafter that it wraps, of any family, and a subclass changes only
what it overrides.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from architectures import VOCAB
from diagonal import diagonal, first
from drafter_table import (
    DRAFTERS,
    MODEL,
    ONE_OF_EACH,
    WITH_LOGITS,
    drive,
    fresh_state,
    loop_of,
    make,
    own_target,
    propose,
)
from drafting import ragged_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from specdec import (
    Drafter,
    EagleDrafter,
    FirstMatch,
    LookaheadDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    Proposal,
    Recent,
    Sinks,
    SpeculativeGenerator,
    Tree,
    WrappedDrafter,
)
from specdec.drafters.join import _Joined
from specdec.lab.evaluation.sweep import with_draft_length
from specdec.samplers import GBVSampler
from specdec.settings import differences

DECLARED = ["num_draft_tokens", "tree_depth", "feature_layers", "row_inputs", "reads_target"]
DECLARED += ["reads_outcome", "extra_slots", "has_memory"]
SAMPLED = {"temperature": [0.7, 0.0, 1.3]}
SOME = [*ONE_OF_EACH, "model, tree", "dspark, rnn, paths"]
OTHERS = [name for name in DRAFTERS if name not in SOME]
IDS, MASK = ragged_prompts(VOCAB, 5, 1, 9)


def fields(draft):
    """All that a draft has, as plain values."""
    tensors = draft.tokens, draft.probs, draft.num_valid, draft.parents
    found = [None if t is None else t.nan_to_num(7.0).tolist() for t in tensors]
    return type(draft), found, draft.depth, draft.runs


def steps_of(generator):
    """Of a greedy text."""
    result = generator.generate(IDS, MASK, max_new_tokens=12, eos_token_id=None)
    return [[vars(step) for step in row] for row in result.steps]


class Twice(WrappedDrafter):
    """Overrides nothing; a wrapper in a wrapper."""

    def __init__(self, inner):
        super().__init__(WrappedDrafter(inner))


@pytest.mark.parametrize("name", first(DRAFTERS, SOME))
@settings(max_examples=2)
@given(st.integers(0, 2**32 - 1), st.sampled_from([SAMPLED, {"temperature": 0}]))
@torch.no_grad()
def test_whoever_wraps_a_drafter_drafts_the_same(name, seed, logits_filter):
    drafters = make(name), WrappedDrafter(make(name)), Twice(make(name))
    for attribute in DECLARED:
        assert len({repr(getattr(drafter, attribute)) for drafter in drafters}) == 1
    runs = [drive(d, seed, vocab_size=VOCAB, logits_filter=logits_filter) for d in drafters]
    for steps in zip(*runs, strict=True):
        plain, *wrapped = (fields(draft) for _, draft, _ in steps)
        assert wrapped == [plain, plain]


@pytest.mark.parametrize(
    ("name", "graphs"),
    diagonal(["lookahead", *SOME], [True, False]) + diagonal(OTHERS, [True, False], is_quick=False),
)
@torch.no_grad()
def test_texts_and_steps_are_the_same_captured_and_eager(name, graphs):
    """Like to like: a captured batch has four rows, an eager one three, and rounds otherwise."""
    options = {"max_new_tokens": 12, "do_sample": True, "seed": [1, 2, 3], "eos_token_id": None}

    def new():
        return LookaheadDrafter(window=4, ngram=3, guesses=2) if name == "lookahead" else make(name)

    def steps_of(drafter):
        result = SpeculativeGenerator(own_target(), drafter, graphs=graphs).generate(
            IDS, MASK, **options
        )
        return result.sequences.tolist(), [[vars(step) for step in row] for row in result.steps]

    assert steps_of(Twice(new())) == steps_of(new())


@dataclass
class Counted:
    inner: Any
    count: torch.Tensor


class Counts(WrappedDrafter):
    """With a state, an outcome and a feature of its own."""

    reads_outcome = True

    def __init__(self, inner, layers=("final",)):
        super().__init__(inner)
        self.feature_layers = tuple(dict.fromkeys((*layers, *inner.feature_layers)))
        self.seen = []

    def init_state(self, batch_size, max_length, **target):
        inner = super().init_state(batch_size, max_length, **target).inner
        return Counted(inner, torch.zeros(batch_size, dtype=torch.long))

    def propose(self, context, state, drawing):
        self.seen.append(context.features.clone())
        return super().propose(context, state, drawing)

    def learn(self, verified, state):
        super().learn(verified, state)
        self.seen.append(verified.output.features.clone())
        state.count += verified.num_new


@pytest.mark.parametrize("name", ["eagle3", "lookup", "mtp", "assistant", "eagle1, learns"])
@torch.no_grad()
def test_a_wrapper_reads_more_features_than_the_drafter_within(name):
    """The assistant's own are queries, of another width."""
    learns = name.endswith("learns")
    inner = make(name.removesuffix(", learns"))
    if learns:
        inner = Counts(inner, layers=(1,))
    drafter, options = Counts(inner), {"max_new_tokens": 12, "eos_token_id": None}
    generator = SpeculativeGenerator(MODEL, drafter)
    generation = generator.start(IDS, MASK, **options)
    while not generation.has_ended.all():
        generator.step(generation)
    count = generation.state.drafter_state.count
    assert count.tolist() == (generation.lengths - MASK.sum(dim=1)).tolist() == [12] * 3
    result = SpeculativeGenerator(MODEL, make(name.removesuffix(", learns"))).generate(
        IDS, MASK, **options
    )
    assert max(result.stats.steps) * 2 == len(drafter.seen)
    hidden = MODEL(IDS[2:], output_hidden_states=True).hidden_states[-1][0, -1]
    torch.testing.assert_close(drafter.seen[1][2, 0, :32], hidden)  # the first learn, its root
    if learns:
        state = MODEL(IDS[2:], output_hidden_states=True).hidden_states[1][0, -1]
        torch.testing.assert_close(inner.seen[1][2, 0, :32], state)
        assert inner.seen[1].shape[2] == 32 * len(inner.feature_layers)


class Shifts(WrappedDrafter):
    """Changes the logits of its drafts: `x * scale + bias` of the first ids."""

    def __init__(self, inner, change):
        super().__init__(inner)
        self.change = change

    def propose(self, context, state, drawing):
        return super().propose(context, state, drawing.with_edit(self.change))


@pytest.mark.parametrize("name", [*WITH_LOGITS[:8], "model, tree", "eagle3, fewer ids, paths"])
@torch.no_grad()
def test_edits_of_wrappers_run_from_the_innermost_one_outwards(name):
    order = []

    def noted(label, change):
        def edit(logits):
            order.append(label)
            return change(logits)

        return edit

    changes = [lambda x: x - 3, lambda x: x.clamp(min=0), lambda x: x * 2]
    drafter, (own, inner, outer) = make(name), map(noted, "pio", changes)
    drafter.proposal = replace(drafter.proposal, edit=own)
    wrapped = Shifts(Shifts(drafter, inner), outer)
    alone = make(name)
    alone.proposal = replace(alone.proposal, edit=lambda x: (x - 3).clamp(min=0) * 2)
    drafts = []
    for each in (wrapped, alone):
        loop, state = loop_of(each, [[3, 1, 4, 1, 5], [9, 2, 6], [5]]), fresh_state(each, 3)
        loop.prefill(each, state, 4)
        drafts.append(fields(propose(each, loop, state, SAMPLED)[0]))
    assert drafts[0] == drafts[1]
    assert order == [*"pio"] * (len(order) // 3) != []


def test_sizes_and_proposals_are_set_on_the_drafter_within():
    drafter = Twice(make("model"))
    drafter.num_draft_tokens, drafter.proposal = 2, Proposal("argmax")
    assert drafter.num_draft_tokens == drafter.inner.inner.num_draft_tokens == 2
    assert drafter.inner.inner.proposal.kind == "argmax"
    tree = WrappedDrafter(make("model, tree"))
    tree.tree = "4x2"
    assert (tree.tree, tree.num_draft_tokens, tree.tree_depth) == (Tree(4, 2), 4, 2)
    assert getattr(WrappedDrafter(PromptLookupDrafter()), "proposal", None) is None


@pytest.mark.parametrize("wrap", [Twice, lambda head: FirstMatch(make("lookup"), head)])
def test_a_copy_has_sizes_of_its_own_over_the_same_weights(wrap):
    drafter = wrap(make("eagle3"))
    shorter = with_draft_length(drafter, 2)
    assert (drafter.num_draft_tokens, shorter.num_draft_tokens) == (4, 2)
    pairs = zip(drafter.parameters(), shorter.parameters(), strict=True)
    assert all(mine is theirs for mine, theirs in pairs)
    expected = SpeculativeGenerator(MODEL, with_draft_length(make("eagle3"), 2))
    found = SpeculativeGenerator(MODEL, shorter)
    if wrap is Twice:
        assert steps_of(found) == steps_of(expected)


def test_settings_are_those_of_the_drafter_within_and_what_follows_from_it_is_none():
    one, other = (WrappedDrafter(PromptLookupDrafter(4, max_ngram=n)) for n in (2, 3))
    assert one.settings()["inner"]["max_ngram"] == 2
    assert differences(one.settings(), other.settings()) == ["inner.max_ngram (2 there, 3 here)"]
    assert not {*DECLARED} & one.settings().keys()


def test_a_wrapper_is_joined_like_any_drafter():
    found = [
        steps_of(
            SpeculativeGenerator(MODEL, FirstMatch(wrap(make("lookup")), wrap(make("eagle3"))))
        )
        for wrap in (lambda drafter: drafter, WrappedDrafter)
    ]
    assert found[0] == found[1]


def kinds(base=Drafter):
    """All drafters of the package."""
    own = [kind for kind in base.__subclasses__() if kind.__module__.startswith("specdec.")]
    return {kind for each in own for kind in (each, *kinds(each))}


def holds_drafters(kind):
    hints = (each.annotation for each in inspect.signature(kind.__init__).parameters.values())
    return "Drafter" in hints and not inspect.isabstract(kind)


@pytest.mark.parametrize("kind", sorted(filter(holds_drafters, kinds()), key=lambda k: k.__name__))
def test_a_wrapper_hands_on_all_that_a_drafter_may_be_asked(kind):
    """Whatever `Drafter` has, a wrapper has of its own; joins are of chains."""
    wrapper = kind(*[make("eagle3"), make("lookup")][: 1 + (kind is not WrappedDrafter)])
    asked = {name for name in {**vars(Drafter), **Drafter.__annotations__} if name[0] != "_"}
    assert {"read_prompts", "num_draft_tokens", "learn"} <= asked
    parts = [vars(part) for part in kind.__mro__[: kind.__mro__.index(Drafter)]]
    own = set().union(vars(wrapper), *parts)
    assert asked - own == ({"tree_depth"} if isinstance(wrapper, _Joined) else set())


LATER = [
    (name, setting)
    for name in ("lookup", "suffix", "lookup or eagle3", "self, recent", "eagle3", "medusa")
    for setting in ("proposal", "tree", "visible", "draft_temperature")
]


@pytest.mark.parametrize(("name", "setting"), LATER)
def test_what_is_set_later_takes_effect_or_is_refused(name, setting):
    """On a drafter, and on one around it: what is read again is what was set."""
    values = {"proposal": Proposal("argmax"), "tree": None, "visible": Sinks(1) + Recent(2)}
    value, drafters = values.get(setting, 0.7), [make(name), WrappedDrafter(make(name))]
    has_logits = name in ("self, recent", "eagle3", "medusa")
    has_it = has_logits and setting != "draft_temperature"
    has_it &= (name, setting) not in {("self, recent", "tree"), ("medusa", "visible")}
    for drafter in drafters:
        if has_it:
            setattr(drafter, setting, value)
            inner = drafter.inner if drafter is drafters[1] else drafter
            assert getattr(drafter, setting) is getattr(inner, setting) is value
        else:
            with pytest.raises(ValueError, match=r"no effect|keeps no keys"):
                setattr(drafter, setting, value)
    if setting == "proposal" and has_it:
        with refused("set proposal=Proposal('argmax')"):
            drafters[1].proposal = "argmax"


BUILT_OF = [
    ("lookup, tree", "num_continuations", 3, "make a new PromptLookupDrafter with another"),
    ("model", "model", MODEL, "make a new ModelDrafter with another"),
    ("self, recent", "layers", (0,), "make a new SelfDrafter with another"),
    ("lookahead", "window", 5, "make a new LookaheadDrafter with another"),
    ("model, tree", "num_draft_tokens", 7, "num_draft_tokens must be .. set tree for another"),
]


@pytest.mark.parametrize(("name", "setting", "value", "message"), BUILT_OF)
def test_what_a_drafter_is_built_of_cannot_be_set(name, setting, value, message):
    drafter = LookaheadDrafter(3, 3, 3) if name == "lookahead" else make(name)
    with refused(message):
        setattr(drafter, setting, value)


def test_a_generator_keeps_its_parts_and_a_lookup_its_continuations():
    generator = SpeculativeGenerator(own_target(), make("lookup, tree"))
    values = {"drafter": "lookup", "sampler": "block", "graphs": True, "draft_length": "auto"}
    for name, value in values.items():
        with refused(f"is built of its {name}; make a new SpeculativeGenerator"):
            setattr(generator, name, value)
    with refused("kept_bytes would have no effect; pass it to SpeculativeGenerator()"):
        generator.kept_bytes = 0
    generator.drafter.num_draft_tokens = 8
    with refused("num_draft_tokens must be .. make a new one for more"):
        generator.start(IDS, MASK, max_new_tokens=3)


class Listens(WrappedDrafter):
    reads_outcome = True


class Forgets(WrappedDrafter):
    feature_layers = ("final",)


def of_model(drafter):
    return lambda: SpeculativeGenerator(MODEL, drafter())


REFUSED = [
    (lambda: WrappedDrafter("lookup"), "WrappedDrafter wraps a drafter, .. got 'lookup'"),
    (lambda: WrappedDrafter(PromptLookupDrafter), "WrappedDrafter wraps a drafter"),
    (of_model(lambda: Listens(make("model"))), "Listens has no method learn(verified, state)"),
    (
        of_model(lambda: Forgets(make("eagle3"))),
        "Forgets.feature_layers is ('final',), and the inner EagleDrafter reads .. declare both",
    ),
    (
        lambda: SpeculativeGenerator(
            MODEL, WrappedDrafter(ModelDrafter(MODEL, tree=Tree(6, 3))), GBVSampler()
        ),
        "samples a tree of 6x3",
    ),
    (
        lambda: WrappedDrafter(make("eagle3")).validate(vocab_size=7, device=torch.device("cpu")),
        "the head was made for a vocabulary",
    ),
]


@pytest.mark.parametrize(("make_it", "message"), REFUSED)
def test_what_cannot_be_wrapped_is_refused_by_name(make_it, message):
    with refused(message):
        make_it()


@pytest.mark.parametrize("kind", [WrappedDrafter, FirstMatch, ModelDrafter, EagleDrafter])
def test_what_is_overridden_is_called_alike(kind):
    """The loop calls methods by place and by name, whichever drafter it has."""
    for name, method in inspect.getmembers(Drafter, inspect.isfunction):
        if name.startswith("_") or (own := getattr(kind, name)) is method:
            continue
        theirs = list(inspect.signature(method).parameters)
        assert list(inspect.signature(own).parameters)[: len(theirs)] == theirs, name
