"""Drafters of heads compute the published wirings: the logits of all draft tokens are those of
`eagle_reference`, `mask_reference` and `mtp_heads.Recomputation`, which have no cache. So after any
pattern of acceptance, what the depths of a prediction module keep is what they would compute anew.

The text arrives as in the loop: a prompt in chunks, then blocks of an accepted prefix and one new
token, of another length in every row. What belongs to no row is NaN or an impossible id. In float64
the two agree to 1e-10, so nothing hides in rounding.
"""

from dataclasses import replace

import eagle_heads
import mask_heads
import mtp_heads
import pytest
import torch
from architectures import build
from drafter_table import drive, fresh_state, loop_of, propose
from drafting import ragged_prompts
from eagle_heads import VOCAB, features_and_logits, flagged, stand_in, tables_of
from eagle_reference import draft_outputs
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_heads import ALIGNMENTS, CORRECTED
from mask_reference import draft_logits, draft_rows
from mtp_checkpoints import random_model, write_numbered
from mtp_heads import Recomputation, randomise
from refusals import refused

from specdec import EagleDrafter, MaskTokenDrafter, MTPDrafter, SpeculativeGenerator, Tree
from specdec.checkpoints import hf_layers
from specdec.drafters import EagleConfig, MTPConfig, MTPHead
from specdec.drafters.proposal import Drafting
from specdec.graphs import no_host_sync

FLOAT64 = {"dtype": torch.float64}
OF_MTP = {f"mtp, {name}": config for name, config in mtp_heads.WIRINGS.items()}
WIRINGS = eagle_heads.WIRINGS | mask_heads.WIRINGS | OF_MTP
FAMILIES = [
    (eagle_heads.WIRINGS, eagle_heads, EagleDrafter),
    (mask_heads.WIRINGS, mask_heads, MaskTokenDrafter),
    (OF_MTP, mtp_heads, MTPDrafter),
]
ROUNDING = dict.fromkeys(OF_MTP, 1e-5)  # their rotary angles are float32
DRAW = Drafting.draw


def wired(name, width=3, *, dtype=torch.float64, changes=None, **options):
    """A drafter of a random head, and what the reference needs of it and of its target."""
    family, kind = next(pair for wirings, *pair in FAMILIES if name in wirings)
    config = replace(WIRINGS[name], **(changes or {}))
    head, target = family.random_head(config, dtype=dtype), stand_in(config, dtype=dtype)
    tables = [table.double() for table in tables_of(target)]
    weights = family.random_head(config).state_dict()
    drafter = kind(head, target, width, **options)
    if kind is MTPDrafter:
        return drafter, {"recomputation": Recomputation(drafter)}
    return drafter, {"config": config, "weights": weights, "tables": tables}


def recomputed(case):
    """Logits `[K, Vd]` of the draft tokens of a path by the published wiring."""
    rest = {name: value for name, value in case.items() if name != "path"}
    if "recomputation" in case:
        return rest.pop("recomputation").logits_after(**rest, path=case["path"])
    if isinstance(case["config"], EagleConfig):
        return draft_outputs(**rest, drafted=case["path"])[0]
    return draft_logits(**rest, count=len(case["path"]), path=case["path"])


class Recorder:
    """The logits `[B, K, V]` that a draft was drawn from."""

    def __init__(self, patch):
        self._seen = []
        patch.setattr(Drafting, "draw", self._draw_of(self._seen))

    @staticmethod
    def _draw_of(seen):
        def draw(drafting, logits, **depth):
            seen.append(logits)
            return DRAW(drafting, logits, **depth)

        return draw

    def take(self):
        logits = torch.cat(self._seen, dim=1)
        self._seen.clear()
        return logits


def drafts_of(drafter, seed, *, dtype=torch.float64, **options):
    """Yields (text, features and path of a row, the logits of its ids) for every proposal."""
    width, ids = drafter.num_draft_tokens, getattr(drafter.head, "target_ids", None)
    sizes = {"hidden_size": drafter.config.target_hidden_size, "dtype": dtype, "vocab_size": VOCAB}
    ids = slice(None) if ids is None else ids
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        for loop, draft, _ in drive(drafter, seed, **sizes, **options):
            logits = recorder.take()
            for b, (text, count) in enumerate(zip(loop.rows, loop.num_new, strict=True)):
                reads = count > 0 or not drafter.feature_layers
                assert int(draft.num_valid[b]) == (width if reads else 0)
                if not reads:
                    continue
                probs = logits[b].softmax(-1).to(draft.probs)
                torch.testing.assert_close(draft.probs[b], probs, rtol=0, atol=1e-6)
                assert (logits[b].isfinite().sum(-1) <= drafter.config.draft_vocab_size).all()
                seen = {"text": list(text), "features": None, "path": draft.tokens[b].tolist()}
                if drafter.feature_layers:
                    seen["features"] = loop.table[b, : len(text) - 1].double()
                yield seen, logits[b][:, ids].double()


@pytest.mark.parametrize("name", WIRINGS)
@settings(max_examples=2)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 9))
@torch.no_grad()
def test_every_draft_is_that_of_the_wiring_recomputed_without_cache(name, seed, width, chunk_size):
    (drafter, case), checked = wired(name, width), 0
    for seen, logits in drafts_of(drafter, seed, chunk_size=chunk_size):
        exact = {"rtol": 0, "atol": ROUNDING.get(name, 1e-10)}
        torch.testing.assert_close(logits, recomputed(case | seen), **exact)
        checked += 1
    assert checked >= 6


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "three layers"])
@torch.no_grad()
def test_in_float32_it_is_to_1e_5(name):
    drafter, case = wired(name, dtype=torch.float32)
    for seen, logits in drafts_of(drafter, 7, dtype=torch.float32):
        torch.testing.assert_close(logits, recomputed(case | seen), rtol=0, atol=1e-5)


# Negative controls: the reference with one fault is far from what the drafter computes.


def with_flags(**flags):
    return lambda c: {"config": flagged(c["config"], **flags)}


def swapped(one, other):
    """Two tensors are exchanged."""
    return lambda c: {
        "weights": c["weights"] | {one: c["weights"][other], other: c["weights"][one]}
    }


def with_halves_exchanged(c):
    found = {name: torch.cat(c["weights"][name].chunk(2, dim=1)[::-1], dim=1) for name in FUSED}
    return {"weights": c["weights"] | found}


FUSED = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
NORMS = "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"
OF_ALL = {
    "nothing": lambda c: {},
    "features one position late": lambda c: {"features": c["features"].roll(1, dims=0)},
    "features one position early": lambda c: {"features": c["features"].roll(-1, dims=0)},
    "the last token is another": lambda c: {"text": [*c["text"][:-1], (c["text"][-1] + 1) % VOCAB]},
}
OF_EAGLE = {
    "tokens beside their own features": lambda c: {"text": [0, *c["text"][:-1]]},
    "draft rows stay where they are": lambda c: {
        "positions": [*range(len(c["text"]) - 1), *[len(c["text"]) - 2] * 9]
    },
    "draft rows one position late": lambda c: {
        "positions": [*range(len(c["text"]) - 1), *range(len(c["text"]), 60)]
    },
    "positions count down": lambda c: {"positions": list(range(60, 0, -1))},
    "normalised feedback": with_flags(feedback_norm=True),
    "norm before the residual": with_flags(norm_before_residual=True),
    "no output norm": with_flags(output_norm=False),
    "other rope base": with_flags(rope=WIRINGS["rope base"].layer.rope),
    "other rope scaling": with_flags(rope=WIRINGS["rope linear"].layer.rope),
    "logits scaled": with_flags(logit_scale=0.5),
    "other eps": with_flags(rms_norm_eps=0.1),
    "norms exchanged": swapped(*NORMS),
    "hidden before embedding": with_halves_exchanged,
    "features in another order": lambda c: {
        "features": torch.cat(c["features"].chunk(3, dim=1)[::-1], dim=1)
    },
    "keys and values exchanged": swapped(FUSED[1], FUSED[2]),
}
OF_MASKS = {
    "the first token is another": lambda c: {"text": [(c["text"][0] + 1) % VOCAB, *c["text"][1:]]},
    "masks one position late": lambda c: {"late": 1},
    "rows sampled one late": lambda c: {"first": 1},
    "rows sampled one early": lambda c: {"first": -1},
    "masks see all": lambda c: {"sees": lambda q, k: torch.ones_like(k <= q)},
    "masks see what precedes them": lambda c: {"sees": lambda q, k: k <= q},
    "masks do not see each other": lambda c: {"sees": lambda q, k: (k < q - 1) | (k == q)},
}
HARMLESS = {
    "p-eagle": {"masks see what precedes them", "the first token is another"},
    "pard": {"masks see what precedes them"},
    "dflash": {"masks see all", "the first token is another"},
    "dspark": {"masks see all", "the first token is another"},
}
"""What makes no difference to a wiring: it is what it does, or it does not read it."""
CONTROLS = [*(("eagle3", fault) for fault in OF_ALL | OF_EAGLE)]
CONTROLS += [(name, fault) for name in HARMLESS for fault in OF_ALL | OF_MASKS]
CONTROLS.remove(("dspark", "rows sampled one early"))  # there is no row before the first
CONTROLS = [(n, fault) for n, fault in CONTROLS if n != "pard" or "features" not in fault]


@pytest.mark.parametrize(("name", "fault"), CONTROLS)
@torch.no_grad()
def test_each_usual_fault_would_show(name, fault):
    (drafter, case), worst = wired(name), 0.0
    change = (OF_ALL | OF_EAGLE | OF_MASKS)[fault]
    for seen, logits in drafts_of(drafter, 3):
        if len(seen["text"]) > 1:
            found = case | seen
            worst = max(worst, (logits - recomputed(found | change(found))).abs().max().item())
    is_harmless = fault == "nothing" or fault in HARMLESS.get(name, ())
    assert worst < 1e-10 if is_harmless else worst > 1e-2


@pytest.mark.parametrize("name", CORRECTED)
@torch.no_grad()
def test_later_tokens_depend_on_the_path_and_the_first_one_does_not(name):
    """The negative control of corrections: a reference with another first token."""
    (drafter, case), worst = wired(name), 0.0
    for seen, logits in drafts_of(drafter, 3):
        first, *others = seen["path"]
        other = recomputed(case | seen | {"path": [(first + 1) % VOCAB, *others]})
        torch.testing.assert_close(logits[0], other[0], rtol=0, atol=1e-10)
        worst = max(worst, (logits - other)[1:].nan_to_num(0, 9, 9).abs().max().item())
    assert worst > 1e-2


@torch.no_grad()
def test_the_walk_through_a_lattice_has_the_distribution_of_all_its_paths():
    """Every path of four ids is forced in a row of its own: its probability is the reference's, and
    all of them together have 1. Without randomness it takes the best candidate each time.
    """
    correction = replace(CORRECTED["lilicorr"].correction, top_k=3)
    sizes = {"vocab_size": 4, "draft_vocab_size": 4, "mask_token_id": 2, "correction": correction}
    drafter, case = wired("lilicorr", 3, changes=sizes)
    paths = torch.cartesian_prod(*[torch.arange(4)] * 3)
    loop = loop_of(drafter, [[3, 0, 2]] * len(paths), hidden_size=mask_heads.WIDTH, **FLOAT64)
    loop.table = loop.table[:1].expand(len(paths), -1, -1)
    state, forced = fresh_state(drafter, len(paths), 4), iter(paths.T[..., None])
    loop.prefill(drafter, state, 2)
    greedy, _ = propose(drafter, loop, state, {"temperature": 0})

    def draw(drafting, logits, **depth):
        DRAW(drafting, logits, **depth)
        drafting.tokens[-1] = next(forced)
        return drafting.tokens[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafting, "draw", draw)
        draft, _ = propose(drafter, loop, state, {"temperature": 0.6})
    text, best = loop.rows[0], []
    case |= {"text": text, "features": loop.table[0, : len(text) - 1]}
    logits = torch.stack([recomputed(case | {"path": path}) for path in paths.tolist()])
    expected = (logits / 0.6).softmax(-1).gather(2, paths[..., None])[..., 0].prod(1)
    found = draft.probs.double().gather(2, paths[..., None])[..., 0].prod(1)
    torch.testing.assert_close(draft.probs.double().sum(-1), torch.ones(len(paths), 3).double())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert float(found.sum()) == pytest.approx(1, abs=1e-5)
    assert int((found > 0).sum()) == 3**3
    for i in range(3):
        path = torch.tensor(best + [0] * (3 - i))
        best.append(int(logits[(paths == path).all(1)][0, i].argmax()))
    assert greedy.tokens[0].tolist() == best


class NaiveRoll(MTPDrafter):
    """Reads new tokens only: what depths computed from rejected tokens stays in their caches."""

    def shift(self, context, state, width, num_later=0):
        window = super().shift(context, state, width, num_later)
        is_new = window.slots >= context.start[:, None]
        return window._replace(slots=torch.where(is_new, window.slots, state.cache.padding_slot))


class RemembersLess(MTPDrafter):
    """The oldest remembered row is lost. At the first step after prefill, and after every step that
    accepts nothing, the last depth has D - 1 stale entries.
    """

    def shift(self, context, state, width, num_later=0):
        window = super().shift(context, state, width, num_later)
        oldest = context.start + context.num_new - self.num_depths
        is_oldest = (window.slots == oldest[:, None]) & (context.num_new == 1)[:, None]
        return window._replace(slots=torch.where(is_oldest, state.cache.padding_slot, window.slots))


@pytest.mark.parametrize("wrong", [MTPDrafter, NaiveRoll, RemembersLess])
@pytest.mark.parametrize("name", ["mtp, chain", "mtp, target"])
@torch.no_grad()
def test_a_window_without_repair_or_with_too_little_would_show(name, wrong):
    (drafter, case), worst = wired(name), 0.0
    drafter.__class__ = wrong
    for seed in range(3):
        for seen, logits in drafts_of(drafter, seed, num_steps=6):
            worst = max(worst, (logits - recomputed(case | seen)).abs().max().item())
    assert worst < 1e-5 if wrong is MTPDrafter else worst > 0.1


# Layers of HF's own classes attend by themselves; their oracle is a drafter that reads the whole
# text at once.

HF_LAYERS = {
    "deepseek_v3": ("DeepseekV3", hf_layers.last_layer),
    "glm4_moe": ("Glm4Moe", hf_layers.last_layer),
    "mistral, sliding": ("Mistral", hf_layers.dense_layer()),
}


@pytest.mark.parametrize("semantics", ["chain", "target"])
@pytest.mark.parametrize("name", HF_LAYERS)
@torch.no_grad()
def test_modules_of_hf_layers_propose_what_a_fresh_drafter_would(name, semantics):
    family, layer_of = HF_LAYERS[name]
    model = random_model(family, vocab_size=VOCAB)
    config = MTPConfig(layer_of(model), VOCAB, num_layers=3, semantics=semantics)
    drafter = MTPDrafter(randomise(MTPHead(config).eval(), 1), model, 4)
    for seed in range(2):
        for loop, draft, _ in drive(
            drafter, seed, vocab_size=VOCAB, logits_filter={"temperature": 0}
        ):
            fresh, context = fresh_state(drafter, 3, VOCAB), loop.context_from_scratch()
            expected, _ = propose(drafter, loop, fresh, {"temperature": 0}, context=context)
            is_valid = draft.num_valid > 0
            assert draft.tokens[is_valid].equal(expected.tokens[is_valid])


def test_a_step_of_modules_that_are_mixtures_of_experts_runs_without_waiting(tmp_path):
    model, _ = write_numbered(tmp_path, "DeepseekV3", num_depths=2)
    model.set_experts_implementation("batched_mm")
    generator = SpeculativeGenerator(model, MTPDrafter.from_pretrained(tmp_path, model, 3))
    prompts = ragged_prompts(model.config.vocab_size, 1, 4, 6, 9)
    state, steps = generator.start(*prompts, max_new_tokens=40, eos_token_id=None), []
    for _ in range(3):
        state.state.buffer.note_longest(10**9)
        with no_host_sync() as seen:
            generator.step(state)
        steps.append(seen.shapes)
    assert steps[0] == steps[1] == steps[2]


def test_no_draft_tokens_decode_plainly():
    model = build("llama")
    prompts = ragged_prompts(model.config.vocab_size, 7, 1, 4)
    drafters = None, MTPDrafter(mtp_heads.head_for(model), model, 0)
    generators = [SpeculativeGenerator(model, drafter) for drafter in drafters]
    texts = [each.generate(*prompts, max_new_tokens=8).sequences for each in generators]
    assert texts[0].equal(texts[1])


# Behind a target.


@pytest.mark.parametrize(
    ("kind", "shift"), [("attention", 0), ("attention", 1), ("attention", -1), ("input", 0)]
)
@torch.inference_mode()
def test_features_are_the_named_hidden_states_of_hfs_plain_forward(kind, shift, monkeypatch):
    """The whole loop behind a Llama; with hidden states off by one the same check fails."""
    model, worst = build("llama"), 0.0
    layers = (1, 2) if kind == "attention" else ("final",)
    head = eagle_heads.head_for(model, kind=kind, feature_layers=layers)
    case = {"config": head.config, "weights": head.state_dict(), "tables": tables_of(model)}
    ids, mask = ragged_prompts(model.config.vocab_size, 7, 1, 4)
    generator = SpeculativeGenerator(model, EagleDrafter(head, model, 3), prefill_chunk_size=3)
    state = generator.start(ids, mask, max_new_tokens=40, eos_token_id=None, do_sample=True, seed=3)
    recorder = Recorder(monkeypatch)
    for _ in range(4):
        texts = [row[:n].tolist() for row, n in zip(state.tokens, state.lengths, strict=True)]
        draft, logits = generator.step(state).draft, recorder.take()
        for b, text in enumerate(texts):
            if len(text) > 1:
                path = draft.tokens[b].tolist()
                known = torch.tensor([text[:-1]])
                features = features_and_logits(model, known, layers, shift)[0][0]
                seen = {"text": text, "path": path, "features": features}
                worst = max(worst, (logits[b] - recomputed(case | seen)).abs().max().item())
    assert worst < 1e-4 if shift == 0 else worst > 1e-2


def test_a_target_in_half_precision_takes_a_head_in_float32():
    model = build("llama", dtype=torch.bfloat16)
    head = eagle_heads.head_for(build("llama"), has_lm_head=False)
    ids, mask = ragged_prompts(model.config.vocab_size, 7, 1, 4)
    generator = SpeculativeGenerator(model, EagleDrafter(head, model, 3))
    result = generator.generate(ids, mask, max_new_tokens=8, do_sample=True, seed=1)
    assert result.lengths == [8] * 3


# Early ends, K, and the end of the positions.


@pytest.mark.parametrize("name", [n for n in CORRECTED if CORRECTED[n].confidence])
@torch.no_grad()
def test_a_draft_ends_before_the_first_token_that_the_head_is_not_sure_of(name):
    (drafter, case), found = wired(name, confidence_threshold=0.55), set()
    head, sizes = drafter.head, FLOAT64 | {"hidden_size": mask_heads.WIDTH}
    for loop, draft, _ in drive(drafter, 3, vocab_size=VOCAB, num_steps=9, **sizes):
        for b, (text, count) in enumerate(zip(loop.rows, loop.num_new, strict=True)):
            if count == 0:
                assert int(draft.num_valid[b]) == 0
                continue
            features = loop.table[b, : len(text) - 1]
            rows = draft_rows(**case, text=list(text), features=features, count=3)
            if drafter.config.confidence == "markov":
                before = torch.tensor([text[-1], *draft.tokens[b, :2].tolist()])
                rows = torch.cat([rows, head.correction.markov_w1.weight[before]], dim=1)
            scores = rows @ head.confidence_head.weight[0] + head.confidence_head.bias
            sure = int((scores.sigmoid() >= 0.55).long().cumprod(0).sum())
            assert int(draft.num_valid[b]) == sure
            found.add(sure)
    assert len(found) >= 3


def test_numbers_without_a_meaning_for_a_head_are_refused():
    """A block bounds K, and a threshold needs a confidence head and a chain."""
    assert wired("dflash", 5)[0].num_draft_tokens == 5
    assert wired("dspark", 6)[0].num_draft_tokens == 6
    with refused("predicts 5 tokens of a path"):
        wired("dflash", 6)
    with refused("needs a head with a confidence head"):
        wired("dspark, rnn", confidence_threshold=0.5)
    with refused("ends chains early, and tree= drafts trees"):
        wired("dspark, markov", 4, tree=Tree(4, 2), confidence_threshold=0.5)
    with refused("confidence_threshold must be"):
        wired("dspark, markov", confidence_threshold=1.5)


def started(drafter, prompts, fill=None):
    """A loop and a state after its prompts, whose storage may be filled before."""
    state = fresh_state(drafter, len(prompts), VOCAB)
    loop = loop_of(drafter, prompts, hidden_size=drafter.config.target_hidden_size, **FLOAT64)
    for buffer in (*state.cache.keys.values(), *state.cache.values.values()):
        if fill is not None:
            buffer.fill_(fill)
    loop.prefill(drafter, state, 4)
    return loop, state


@pytest.mark.parametrize("name", [n for n, c in mask_heads.WIRINGS.items() if c.block_size is None])
@torch.no_grad()
def test_a_causal_head_proposes_the_same_first_tokens_for_any_k(name):
    """Masks after a row make no difference to it."""
    drafts = []
    for width in (5, 1, 2):
        drafter, _ = wired(name, width)
        drafts.append(propose(drafter, *started(drafter, [[3, 1, 4, 1]]), {})[0].probs)
    for probs in drafts[1:]:
        torch.testing.assert_close(probs, drafts[0][:, : probs.shape[1]], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ALIGNMENTS)
@torch.no_grad()
def test_rows_past_the_heads_positions_are_never_written_and_fewer_tokens_are_valid(name):
    """A text that grows into the limit: proposals are those of a head without one, as long as they
    last, and no slot at the limit is touched.
    """
    limit, width, config, seen = 14, 3, WIRINGS[name], set()
    drafters = [wired(name, width, changes=c)[0] for c in ({"max_positions": limit}, {})]
    prompts = [[3, 1, 4, 1, 5, 9], [2, 7, 1]]
    loops, states = zip(*(started(d, prompts, 5.0) for d in drafters), strict=True)
    first = config.rows.first_row - config.rows.shift + 1
    for step in range(14):
        runs = zip(drafters, loops, states, strict=True)
        bound, free = (propose(*run, {})[0] for run in runs)
        for b, row in enumerate(loops[0].rows):
            valid = int(bound.num_valid[b])
            assert valid == min(max(limit - (len(row) - 1 + first), 0), width), step
            seen.add(valid)
            if config.block_size is None or len(row) - 1 + config.block_size <= limit:
                pair = bound.probs[b, :valid], free.probs[b, :valid]
                torch.testing.assert_close(*pair, rtol=0, atol=1e-10)
        for loop in loops:
            loop.commit([[1 + step % 7], [2 + step % 5]])
    assert {0, 1, 2, 3} <= seen
    cache = states[0].cache
    for buffer in (*cache.keys.values(), *cache.values.values()):
        assert bool((buffer[:, limit : cache.padding_slot] == 5.0).all())
