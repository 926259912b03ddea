"""Slot and position are two things: nodes of a tree that share a position get what HF's own forward
gives under a dense 4-D mask and `position_ids`.

The oracle is the model over all tokens at once: the committed text, and after it the nodes, each of
which sees the text and its ancestors. Sliding windows count positions.
"""

import pytest
import torch
from architectures import VOCAB, build

from specdec import Target
from specdec.drafters.head.layer_config import LayerConfig
from specdec.drafters.head.layers import build_layer
from specdec.drafters.head.window import WindowPlan
from specdec.slots.attention import window_mask
from specdec.slots.cache import SlotCache, Window

PARENTS = [-1, 0, 0, 1, 1, 2, 5, 6, 7]
"""The node that each node hangs on; the first is the root. Two nodes have depth 1."""
DEPTHS = torch.tensor([0, 1, 1, 2, 2, 2, 3, 4, 5])
COUNT = len(PARENTS)
LENGTHS = 11, 7


def ancestors():
    """`[N, N]`: each node sees itself and what it hangs on."""
    visible = torch.eye(COUNT, dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            visible[node] |= visible[parent]
    return visible


def by_hf(model, text, nodes, window):
    """HF's logits `[N, V]` of the nodes after one text, by a dense mask for each kind of layer."""
    length = len(text)
    positions = torch.cat([torch.arange(length), length + DEPTHS])
    seen = torch.ones(length + COUNT, length + COUNT, dtype=torch.bool).tril()
    seen[length:, length:] = ancestors()
    masks = {"full_attention": seen}
    if window is not None:
        masks["sliding_attention"] = seen & (positions > positions[:, None] - window)
    masks = {kind: torch.where(mask, 0.0, -torch.inf)[None, None] for kind, mask in masks.items()}
    if len(set(getattr(model.config, "layer_types", None) or [0])) == 1:
        masks = list(masks.values())[-1]
    ids = torch.cat([text, nodes])[None]
    out = model(input_ids=ids, attention_mask=masks, position_ids=positions[None], use_cache=False)
    return out.logits[0, length:]


def by_slots(target, texts, nodes, positions, visible):
    """Logits `[2, N, V]` of a ragged window over two rows."""
    lengths = torch.tensor(LENGTHS)
    cache = target.init_cache(2, 32)
    target.prefill(cache, texts, lengths, offset=0)
    slots = lengths[:, None] + torch.arange(COUNT)
    logits, _ = target.forward(nodes, cache, slots, positions=positions, visible=visible)
    return logits


@pytest.mark.parametrize(
    ("name", "window"), [("llama", None), ("mistral_sliding", 7), ("gemma3", 7), ("gpt2", None)]
)
@torch.no_grad()
def test_two_nodes_of_one_position_get_what_a_dense_mask_gives_in_hf(name, window):
    model = build(name)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(1, VOCAB, (2, max(LENGTHS)), generator=generator)
    nodes = torch.randint(1, VOCAB, (2, COUNT), generator=generator)
    positions = torch.tensor(LENGTHS)[:, None] + DEPTHS
    visible = ancestors().expand(2, -1, -1)
    ours = by_slots(Target(model), texts, nodes, positions, visible)
    for row, length in enumerate(LENGTHS):
        expected = by_hf(model, texts[row, :length], nodes[row], window)
        torch.testing.assert_close(ours[row], expected, rtol=0, atol=2e-5)
    chain = by_slots(Target(model), texts, nodes, None, None)
    own = by_slots(Target(model), texts, nodes, positions, None)
    assert (chain[0] - ours[0]).abs().max() > 1e-3  # the tree would show
    assert (own[0] - ours[0]).abs().max() > 1e-3


@torch.no_grad()
def test_a_heads_pass_attends_by_its_nodes_and_turns_by_their_positions():
    layer = LayerConfig(16, 24, num_heads=4, num_kv_heads=2, head_dim=6)
    block, length = build_layer(layer, 0).double(), 5
    where = {"dtype": torch.float64, "device": torch.device("cpu")}
    cache, table = (
        SlotCache(1, 32, {0: layer.key_value_shape(**where)}),
        layer.rotary_table(33, **where),
    )
    hidden = torch.randn(1, length + COUNT, 16, generator=torch.Generator().manual_seed(1)).double()
    slots, bound = torch.arange(length + COUNT)[None], {"table": table}
    step = WindowPlan(cache, slots[:, :length], **bound).open(0)
    block(hidden[:, :length], step.angles, step.attend)
    tree = {"positions": length + DEPTHS[None], "visible": ancestors()[None]}
    step = WindowPlan(cache, slots[:, length:], **bound, **tree).open(0)
    ours = block(hidden[:, length:], step.angles, step.attend)
    for node in range(COUNT):  # each node alone after its own path is a chain
        path = [i for i in range(COUNT) if ancestors()[node, i]]
        rows = [*range(length), *(length + i for i in path)]
        alone = SlotCache(1, 32, {0: layer.key_value_shape(**where)})
        step = WindowPlan(alone, slots[:, : len(rows)], **bound).open(0)
        expected = block(hidden[:, rows], step.angles, step.attend)[:, -1]
        torch.testing.assert_close(ours[:, node], expected, rtol=0, atol=1e-12)


def test_positions_and_visibility_of_a_chain_are_those_of_its_slots():
    slots = torch.tensor([[3, 4, 5], [9, 10, 11]])
    chain = Window(slots, 16)
    same = Window(
        slots, 16, positions=slots, visible=torch.ones(3, 3, dtype=torch.bool).tril()[None]
    )
    for sliding_window in (None, 2, 5):
        wanted = window_mask(chain, 3, torch.float32, sliding_window)
        assert window_mask(same, 3, torch.float32, sliding_window).equal(wanted)
