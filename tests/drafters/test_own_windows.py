"""Drafters that see a part of their own keys and values: a draft is what the head, or the draft
model, computes without a cache where every token sees the first ones and the last ones alone.

So a draft is a function of the text and the rule, whatever the chunks of its prompt were and
whatever was accepted before. References and the drive are those of `test_parity.py` and
`test_model_drafter.py`.
"""

from functools import partial

import pytest
import torch
from architectures import VOCAB, build
from diagonal import first
from drafter_table import (
    MODEL,
    TREE,
    drive,
    is_valid,
    make,
    own_target,
)
from drafting import ragged_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_heads import Recomputation
from refusals import refused
from test_model_drafter import FILTERS, check
from test_parity import ROUNDING, WIRINGS, drafts_of, recomputed, wired

from specdec import (
    ModelDrafter,
    Recent,
    Sinks,
    SpeculativeGenerator,
    TopSlots,
    certify,
    zoo,
)
from specdec.drafters import Visible
from specdec.loading import load_drafter

seeds = st.integers(0, 2**32 - 1)
rules = st.builds(Visible, sinks=st.integers(0, 3), recent=st.integers(1, 9))


def sees(visible, queries, keys, *, is_causal=True):
    """Who sees whom, of positions that broadcast."""
    is_near = (keys > queries - visible.recent) | (keys < visible.sinks)
    return is_near & (keys <= queries) if is_causal else is_near


HEADS = ["eagle1", "eagle3", "three layers", "p-eagle", "pard", "dflash", "dspark, rnn"]
HEADS += ["mtp, chain", "mtp, target", "mtp, five depths"]


def reference(name, drafter, case, visible):
    """What the reference needs of a head, under the rule."""
    config = WIRINGS[name]
    rule = partial(sees, visible, is_causal=getattr(config, "is_causal", True))
    if "recomputation" in case:
        return {"recomputation": Recomputation(drafter, rule)}
    return case | {"sees": rule}


@pytest.mark.parametrize("name", HEADS)
@settings(max_examples=3)
@given(seeds, rules, st.integers(1, 5), st.integers(1, 9))
@torch.no_grad()
def test_a_draft_is_that_of_the_head_without_cache_under_the_same_mask(
    name, seed, visible, width, chunk_size
):
    drafter, case = wired(name, width, visible=visible)
    case = reference(name, drafter, case, visible)
    for seen, logits in drafts_of(drafter, seed, chunk_size=chunk_size):
        exact = {"rtol": 0, "atol": ROUNDING.get(name, 1e-10)}
        torch.testing.assert_close(logits, recomputed(case | seen), **exact)


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_a_rule_of_one_token_more_or_less_would_show(name):
    """The negative control: the reference of a rule beside it."""
    visible = Sinks(1) + Recent(4)
    drafter, case = wired(name, visible=visible)
    for other in (Sinks(2) + Recent(4), Sinks(1) + Recent(5), Sinks(2) + Recent(3)):
        wrong, worst = reference(name, drafter, case, other), 0.0
        for seen, logits in drafts_of(drafter, 5):
            worst = max(worst, (logits - recomputed(wrong | seen)).abs().max().item())
        assert worst > 1e-3


def masked(model, visible):
    """The draft model, whose forward of a whole text shows each token a part of it."""

    def forward(input_ids, use_cache=False):
        index = torch.arange(input_ids.shape[1])
        seen = sees(visible, index[:, None], index)
        mask = torch.zeros(1, 1, *seen.shape).masked_fill(~seen, -torch.inf)
        return model(input_ids=input_ids, attention_mask=mask, use_cache=use_cache)

    return forward


ATTENTION = ["llama", "gpt2", "mpt", "gptj", "deepseek_v3", "qwen3"]
MODELS = {name: build(name) for name in ATTENTION}


@pytest.mark.parametrize("name", first(ATTENTION, ["llama", "mpt", "deepseek_v3"]))
@settings(max_examples=3)
@given(seeds, st.sampled_from(FILTERS), rules, st.integers(1, 4), st.integers(1, 9))
@torch.no_grad()
def test_a_draft_model_is_its_forward_without_cache_through_a_mask(
    name, seed, logits_filter, visible, width, chunk_size
):
    """Those that call HF's interface, that attend by a dense mask, and over latents."""
    drafter = ModelDrafter(MODELS[name], width, visible=visible)
    options = {"chunk_size": chunk_size, "logits_filter": logits_filter, "num_steps": 3}
    for loop, draft, noise in drive(drafter, seed, vocab_size=VOCAB, **options):
        check(draft, noise, loop, masked(MODELS[name], visible), logits_filter)


@torch.no_grad()
def test_a_layer_with_a_sliding_window_sees_the_last_of_it():
    """Its window is of 7 tokens: a rule of more changes nothing, one of 5 is a window of 5."""
    model, narrow = build("mistral_sliding"), build("mistral_sliding")
    assert model.config.sliding_window == 7
    narrow.load_state_dict(model.state_dict())
    narrow.config.sliding_window = 5
    for visible, plain in ((Sinks(4) + Recent(3), model), (Sinks(2) + Recent(3), narrow)):
        drafter = ModelDrafter(model, 3, visible=visible)
        for loop, draft, noise in drive(drafter, 1, vocab_size=VOCAB, num_steps=6):
            check(draft, noise, loop, plain, {})


@torch.no_grad()
def test_nodes_of_a_tree_see_what_a_text_that_ends_in_their_path_would():
    """Greedy trees: a node's token is one of the likeliest after its ancestors."""
    visible, num_hidden = Sinks(1) + Recent(3), 0
    drafter = make("model", tree=TREE, visible=visible)
    models = masked(drafter.model, visible), drafter.model
    greedy = {"logits_filter": {"temperature": 0}, "num_steps": 3}
    for loop, draft, _ in drive(drafter, 2, vocab_size=VOCAB, **greedy):
        for b, text in enumerate(loop.rows):
            paths = [[]]
            for node, parent in enumerate(draft.parents[b].tolist()):
                above, token = paths[parent + 1], int(draft.tokens[b, node])
                ids, ranks = torch.tensor([text + above]), []
                for model in models:
                    logits = model(input_ids=ids, use_cache=False).logits[0, -1]
                    ranks.append(int((logits > logits[token]).sum()))
                paths.append([*above, token])
                assert ranks[0] < drafter.tree.top_k
                num_hidden += ranks[1] >= drafter.tree.top_k
    assert num_hidden  # it differs where all is seen


# In the loop.

KINDS = ["model", "eagle3", "p-eagle", "dflash", "mtp", "model, tree", "p-eagle, tree"]
KINDS += ["eagle3, fewer ids, tree"]
QUICK = ["model", "eagle3", "p-eagle, tree"]
BATCH, MASK = ragged_prompts(VOCAB, 1, 14, 26)
SEEN = Sinks(2) + Recent(5)


@pytest.mark.parametrize("kind", first(KINDS, QUICK))
@torch.no_grad()
def test_while_all_is_seen_no_bit_differs(kind):
    """Texts of 30 tokens at most, a draft included."""
    drafters = make(kind, 3), make(kind, 3, visible=Sinks(4) + Recent(26))
    runs = (drive(drafter, 4, vocab_size=VOCAB, num_steps=3) for drafter in drafters)
    for (_, one, _), (_, other, _) in zip(*runs, strict=True):
        drafts = is_valid(one)
        assert drafts.equal(is_valid(other))
        assert one.tokens[drafts].equal(other.tokens[drafts])
        assert one.probs[drafts].equal(other.probs[drafts])


@pytest.mark.parametrize("kind", first(KINDS, QUICK))
def test_greedy_text_is_hfs_and_captured_steps_are_eager_ones(kind):
    """And a row drafts alone what it does beside others, after others have left the batch."""
    generator = SpeculativeGenerator(own_target(), make(kind, 3, visible=SEEN), graphs=True)
    greedy = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    found = generator.generate(BATCH, MASK, check=True, **greedy)
    assert found.sequences.equal(MODEL.generate(BATCH, attention_mask=MASK, **greedy))
    alone = generator.generate(BATCH[2:], MASK[2:], **greedy)
    accepted = ([step.num_accepted for step in row] for row in (alone.steps[0], found.steps[2]))
    assert next(accepted) == next(accepted)


def test_another_rule_is_another_storage():
    """A call after the drafter was given one draws other drafts than the call before."""
    drafter = make("model", 3)
    generator = SpeculativeGenerator(own_target(), drafter, graphs=True)
    options = {"max_new_tokens": 16, "do_sample": True, "seed": [1, 2, 3], "pad_token_id": 0}
    found = []
    for visible in (None, SEEN, None, SEEN):
        drafter.visible = visible
        stats = generator.generate(BATCH, MASK, **options).stats
        found.append((stats.accepted, stats.drafted))
    assert found[:2] == found[2:]
    assert found[0] != found[1]
    assert drafter.settings()["visible"]["recent"] == 5


@pytest.mark.swept
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_drawn_from_the_targets_distribution(kind):
    generator = SpeculativeGenerator(own_target(), make(kind, 3, visible=SEEN), graphs=True)
    quick = {"num_samples": 64, "max_new_tokens": 8, "audit_tokens": 24}
    report = certify(generator, [BATCH[2].tolist(), [3]], **quick)
    assert report.passed, report


class EverySecond(Visible):
    """A rule of one's own."""

    def slots(self, lengths, width, top=None):
        return super().slots(lengths, width, top) // 2 * 2


def test_what_no_cache_of_its_own_can_show_is_refused():
    own = "write Sinks(4) + Recent(1024), or let the target draft with SelfDrafter"
    for kind in ("model", "eagle3"):
        with refused(f"takes Sinks and Recent, got TopSlots .. {own}"):
            make(kind, visible=TopSlots(4) + Recent(4))
        with refused(f"got the rule of EverySecond .. {own}"):
            make(kind, visible=EverySecond(recent=4))
        with refused("sees itself; add Recent(1024)"):
            make(kind, visible=Sinks(4))
        with refused("visible must be like Sinks(4) + Recent(1024), got 1024"):
            make(kind, visible=1024)
    with refused("attend by chunks, of which no part can be shown; leave out visible="):
        ModelDrafter(build("llama4"), visible=SEEN)
    for kind, name in (("medusa", "MedusaDrafter"), ("assistant", "AssistantDrafter")):
        with refused(f"{name} keeps no keys and values of its own .. leave out visible="):
            make(kind, visible=SEEN)


@pytest.mark.parametrize("name", ["model", "eagle3", "mask-token", "mtp"])
def test_what_is_loaded_takes_it_too(name):
    drafter = load_drafter(f"zoo:{name}", zoo.load_target(), 3, visible=SEEN)
    assert drafter.visible is SEEN
    state = drafter.init_state(1, 40, vocab_size=2048, device=torch.device("cpu"))
    assert state.cache.near == (5, 2)
