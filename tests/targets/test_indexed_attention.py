"""Layers that read the keys which an indexer chooses: DeepSeek-V3.2, GLM 5 and their kin.

The oracle is HF's `generate` of each row alone. All families have 32 index heads here: with few of
them scores are exactly 0 for several keys, and which of those HF takes depends on how many there
are, so that HF's own text does, too.
"""

import copy
from functools import cache
from itertools import product

import pytest
import torch
import transformers
from agreement import check_captured
from census.shapes import VOCAB, build
from diagonal import PLACES, case, first
from drafting import WrongDrafter, perturbed
from refusals import refused
from target_laws import DIFFERS, RaggedBatch, check_found, without_dense_masks
from transformers import AttentionInterface

from specdec import ModelDrafter, SelfDrafter, Target, Tree
from specdec.drafters import Recent
from specdec.slots.cache import SlotCache
from specdec.slots.layout import Indexer
from specdec.targets.edits import convolutions
from specdec.targets.edits.blocks import BLOCKS as BLOCKED
from specdec.targets.edits.blocks import block_attention
from specdec.targets.edits.indexed import INDEXED, indexed_attention
from specdec.targets.edits.pooled import pool_size
from specdec.types import Draft

GROUPS = {
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note"), "causal"),
    **dict.fromkeys(("mistral_large4", "hy_v4_vl", "glm5_next"), "multimodal"),
    **{"minimax_m3_vl_text": "causal", "minimax_m3_vl": "multimodal"},
}
HAS = [name for name in GROUPS if name in transformers.CONFIG_MAPPING]
FEW, ALL = 5, 64
"""Keys that are chosen: fewer than the texts have, and more than there are."""
BATCH = RaggedBatch(VOCAB - 1, (1, 9, 17, 24), 16)


def choosing(model, count):
    """The model, whose indexers choose so many keys, in whole pools or blocks."""
    indexers = [m for m in model.modules() if hasattr(m, "index_topk") or hasattr(m, "topk_blocks")]
    assert indexers
    for indexer in indexers:
        if hasattr(indexer, "topk_blocks"):
            indexer.block_size, indexer.topk_blocks = 2, count // 2
        else:
            indexer.index_topk = count - count % pool_size(indexer)
    return model


def skip_without(name):
    if name not in HAS:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")


@cache
def model_of(name, count=FEW, seed=0):
    skip_without(name)
    return choosing(build(name, group=GROUPS[name], window=8, seed=seed), count)


DRAFTERS = {
    "lookup": lambda model: "lookup",
    "good": lambda model: ModelDrafter(perturbed(model), 4),
    "tree": lambda model: ModelDrafter(perturbed(model), tree=Tree(nodes=9, depth=4, top_k=3)),
    "wrong": lambda model: WrongDrafter(model, 3),
    "itself": lambda model: ModelDrafter(model, 4),
    "none": lambda model: None,
    "own keys": lambda model: SelfDrafter(model, 3, visible=Recent(6)),
}
RATES = {"wrong": 0, "itself": 1}
RECURRENT = {"glm5_next"}
"""Has linear attention, too: it reads chains only, and nothing behind the text."""
BLOCKS = {"minimax_m3_vl_text", "minimax_m3_vl"}
"""Choose blocks of slots, and so read chains only."""


def fitting(name, kind):
    has_no = ("tree", "own keys") if name in RECURRENT else ("tree",) if name in BLOCKS else ()
    return "good" if kind in has_no else kind


def without_twins(cases):
    """Swept cases that would be the same as another one are left out."""
    return [c for c in cases if not c.marks or fitting(*c.values[:2]) == c.values[1]]


QUICK = [("deepseek_v32", "lookup", FEW, 4), ("glm_moe_dsa", "good", ALL, 512)]
QUICK += [("axk2", "tree", FEW, 512), ("dots3_note", "itself", FEW, 4)]
QUICK += [("minimax_m3_vl_text", "good", FEW, 512)]


@pytest.mark.parametrize(
    ("name", "kind", "count", "chunk"),
    without_twins(
        case([*each], each in QUICK) for each in product(GROUPS, DRAFTERS, (FEW, ALL), (4, 1, 512))
    ),
)
def test_greedy_text_is_that_of_hf(name, kind, count, chunk):
    model, kind = model_of(name, count), fitting(name, kind)
    result = BATCH.check_greedy(model, DRAFTERS[kind](model), chunk)
    if kind in RATES:
        assert result.stats.acceptance_rate == RATES[kind]


@pytest.mark.parametrize("name", first(GROUPS, ["deepseek_v32"]))
def test_what_is_chosen_changes_texts(name):
    assert BATCH.texts(model_of(name, FEW)) != BATCH.texts(model_of(name, ALL))


@pytest.mark.parametrize("name", first(GROUPS, ["glm_moe_dsa", "dots3_note"]))
def test_rows_that_leave_take_their_index_keys_with_them(name, monkeypatch):
    model = model_of(name)
    for kind in {fitting(name, kind) for kind in ("good", "tree")}:
        BATCH.check_rows_leave(model, DRAFTERS[kind](model), monkeypatch)


CAPTURED = [("glm_moe_dsa", "tree"), ("minimax_m3_vl_text", "good")]


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize(
    ("name", "kind"),
    without_twins(
        case([n, k], (n, k) in CAPTURED) for n in GROUPS for k in ("good", "tree", "lookup")
    ),
)
def test_captured_steps_are_the_eager_ones(name, kind, device):
    model, kind = copy.deepcopy(model_of(name)).to(device), fitting(name, kind)
    if device == "cpu":
        model.set_experts_implementation("batched_mm")  # the default waits there
    check_captured(model, DRAFTERS[kind](model), BATCH.ids, BATCH.mask, **BATCH.options)


# The table of an indexer's keys.


def verified_logits(target, poison):
    """Logits of a ragged window, with the cache poisoned between prefill and verification."""
    read, count = torch.tensor([3, 9, 1]), 3
    tokens = torch.randint(3, VOCAB, (3, 14), generator=torch.Generator().manual_seed(0))
    cache = target.init_cache(3, 48, extra_slots=0)
    target.prefill(cache, tokens[:, :9], read, offset=0)
    slots = torch.arange(49)
    for key, buffer in cache.keys.items():
        if isinstance(key, Indexer) or poison == 1e30:
            buffer[slots >= read[:, None]] = poison
    return target.verify(cache, read, tokens[:, 9], Draft(tokens[:, 10 : 10 + count])).logits


@pytest.mark.parametrize("name", first(GROUPS, ["deepseek_v32", "hy_v4_vl", "minimax_m3_vl"]))
@torch.no_grad()
def test_garbage_in_index_keys_changes_no_logit(name):
    target = Target(model_of(name))
    clean = verified_logits(target, 0.0)
    assert bool(clean.isfinite().all())
    for poison in (1e30, float("nan"), float("inf")):
        assert verified_logits(target, poison).equal(clean)


@torch.no_grad()
def test_a_node_of_a_tree_chooses_among_its_own_path():
    """Siblings before it score higher than all of its path, and are not among what it reads."""
    target, read = Target(model_of("deepseek_v32")), torch.tensor([12])
    tokens = torch.randint(3, VOCAB, (1, 30), generator=torch.Generator().manual_seed(1))
    parents = torch.tensor([[-1, -1, 0, 0, 1, 4]])  # as indices of the draft, -1 for its root
    paths = [[0, 2], [0, 3], [1, 4, 5]]
    draft = Draft(tokens[:, 13:19], parents=parents)

    def logits(draft):
        cache = target.init_cache(1, 40)
        target.prefill(cache, tokens[:, :12], read, offset=0)
        return target.verify(cache, read, tokens[:, 12], draft).logits[0]

    tree = logits(draft)
    for path in paths:
        chain = logits(Draft(draft.tokens[:, path]))
        torch.testing.assert_close(
            tree[[0, *(node + 1 for node in path)]], chain, rtol=0, atol=2e-5
        )
    linear = logits(Draft(draft.tokens))
    assert (linear[1:] - tree[1:]).abs().max() > 1e-2


# Faults.


def stale(cache, states, layer):
    """The key of the newest token of a window is that of garbage."""
    keys = UPDATE(cache, states, layer).clone()
    rows = torch.arange(len(keys))
    keys[rows, cache.window.slots[:, -1].clamp(max=keys.shape[1] - 1)] = 0.0
    return keys


def never_written(cache, states, layer):
    keys = cache.keys[Indexer(layer)]
    return keys[:, : cache.window.num_attended, 0]


def written_late(cache, states, layer):
    """What is read is of the window before."""
    before = never_written(cache, states, layer).clone()
    UPDATE(cache, states, layer)
    return before


UPDATE = SlotCache.update_indexer
FAULTS = {
    "stale": stale,
    "one_slot_late": lambda *given: UPDATE(*given).roll(1, dims=1),
    "of_another_row": lambda *given: UPDATE(*given).flip(0),
    "never_written": never_written,
    "written_late": written_late,
}


@pytest.mark.parametrize(
    ("name", "fault", "count"),
    [
        case([name, fault, count], (fault != "stale") == (count == 2048))
        for name in ("deepseek_v32", "minimax_m3_vl_text")
        for fault in FAULTS
        for count in (FEW, 2048)
        if name == "deepseek_v32" or fault != "stale"  # a token's own block is always chosen
    ],
)
def test_the_self_test_finds_a_wrong_index_key(name, fault, count, monkeypatch):
    """Of 2048 keys, as released models choose, short texts have none to leave out; they are tried
    with fewer.
    """
    skip_without(name)
    monkeypatch.setattr(SlotCache, "update_indexer", FAULTS[fault])
    check_found(choosing(build(name), count), monkeypatch)


def chosen_by(attend, name, changed):
    """An attention function with a fault in layer 1: it reads other keys or blocks."""

    def faulty(module, *args, **options):
        if module.layer_idx == 1:
            options[name] = changed(options[name], args[1].shape[2])
        return attend(module, *args, **options)

    return faulty


CHOICES = {
    "an index too far": lambda indices, count: (indices + 1).clamp(0, count - 1),
    "an index too near": lambda indices, count: (indices - 1).clamp(0, count - 1),
    "of the other row": lambda indices, count: indices.flip(0),
    "all": lambda indices, count: torch.arange(count, dtype=indices.dtype).expand(
        *indices.shape[:2], -1
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype", "fault"),
    [
        case([name, dtype, fault], (name, dtype) == ("glm_moe_dsa", torch.float32))
        for name in ("glm_moe_dsa", "deepseek_v32")
        for dtype in (torch.float32, torch.bfloat16)
        for fault in CHOICES
    ],
)
def test_the_self_test_finds_a_wrong_choice(name, dtype, fault, monkeypatch):
    """In one layer of four; HF's own attention under a dense mask has no such fault."""
    model = choosing(build(name), 2048).to(dtype)
    without_dense_masks(monkeypatch)
    Target(model)
    faulty = chosen_by(indexed_attention, "indices", CHOICES[fault])
    monkeypatch.setitem(AttentionInterface._global_mapping, INDEXED, faulty)
    with refused(f"layers.1.self_attn {DIFFERS}"):
        Target(choosing(model, 2047))


BLOCK_CHOICES = {
    "a block too near": lambda blocks, _: (blocks - 1).clamp(min=-1),
    "of the other row": lambda blocks, _: blocks.flip(0),
    "of the other heads": lambda blocks, _: blocks.flip(1),
    "the first ones": lambda blocks, _: torch.arange(blocks.shape[-1]).expand_as(blocks),
}


@pytest.mark.parametrize("fault", BLOCK_CHOICES)
def test_the_self_test_finds_a_wrong_choice_of_blocks(fault, monkeypatch):
    """In one layer of three; with blocks of 128 keys, as released models have."""
    skip_without("minimax_m3_vl_text")
    model = build("minimax_m3_vl_text")
    for layer in model.model.layers[1:]:
        layer.self_attn.indexer.block_size, layer.self_attn.indexer.topk_blocks = 128, 16
    Target(model)
    faulty = chosen_by(block_attention, "block_indices", BLOCK_CHOICES[fault])
    monkeypatch.setitem(AttentionInterface._global_mapping, BLOCKED, faulty)
    model.model.layers[1].self_attn.indexer.topk_blocks = 15  # so that it is tried again
    with refused(f"layers.1.self_attn {DIFFERS}"):
        Target(model)


@pytest.mark.parametrize("count", [FEW, 2048])
def test_a_model_that_chooses_blocks_takes_chains_only(count):
    """A node's place in its block is that of its position, and siblings have slots of their own."""
    skip_without("minimax_m3_vl_text")
    target = Target(choosing(build("minimax_m3_vl_text"), count))
    with refused("cannot read the window of a tree"):
        target.check_trees()


def test_a_model_that_chooses_among_equal_scores_is_refused():
    """HF's choice among them depends on how many keys there are, and is none of the text's."""
    model = choosing(build("deepseek_v32"), FEW)
    for layer in model.model.layers:
        layer.self_attn.indexer.weights_proj.weight.data[:] = 0.0
    with refused("cannot be decoded"):
        Target(model)


def test_the_self_test_finds_a_token_that_is_read_as_kept_before_it_is(monkeypatch):
    """HF's way for one token of GLM-5-next's linear attention, in a chunk of one token."""
    model = model_of("glm5_next")
    Target(model)
    monkeypatch.setattr(convolutions, "edit", lambda view, attention: None)
    with refused("cannot be decoded"):
        Target(choosing(model, FEW + 4))
    choosing(model, FEW)


def test_layers_of_a_target_with_indexers_cannot_be_left_out():
    with refused("an indexer of another layer"):
        SelfDrafter(model_of("glm_moe_dsa"), 3, layers=2)
