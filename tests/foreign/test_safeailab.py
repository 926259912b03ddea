"""The dynamic tree of a head is that of SafeAILab's own `topK_genrate`: nodes, parents and order.

Their code is not part of the project. `EAGLE_CHECKOUT` names a clone of github.com/SafeAILab/EAGLE
(CONTRIBUTING.md). Their model reads the file that `save_pretrained` writes in their layout; both
then get the same text and features.
"""

import json
import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from eagle_heads import EAGLE3, VOCAB, features_for, flagged, random_head, stand_in
from safetensors.torch import load_file

from specdec import EagleDrafter, Tree
from specdec.samplers import LogitsFilter, draw_by_inversion
from specdec.samplers.noise import Drawing
from specdec.types import Context

EAGLE = os.environ.get("EAGLE_CHECKOUT")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(EAGLE is None, reason="EAGLE_CHECKOUT names no clone of SafeAILab/EAGLE"),
]
WHOLE = flagged(EAGLE3, head_dim=4)  # their heads are as wide as the model, all together


@dataclass(frozen=True)
class Grown:
    """A tree, as nodes after the root."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]


def theirs(folder, drafter: EagleDrafter, tree: Tree, text, features, monkeypatch) -> Grown:
    """By their code; its `total_tokens` counts the root, its `depth` not the first level."""
    monkeypatch.setattr(sys, "path", [EAGLE, *sys.path])
    from eagle.model.cnets import Model

    drafter.save_pretrained(folder, "safeailab")
    # Their EConfig derives from transformers', whose version 5 renames what they read.
    fields = json.loads((folder / "config.json").read_text())
    defaults = {"pad_token_id": 0, "pretraining_tp": 1, "rope_scaling": None}
    config = SimpleNamespace(**defaults | fields)
    sizes = {"total_tokens": tree.nodes + 1, "depth": tree.depth - 1, "top_k": tree.top_k}
    model = Model(config, **sizes)
    loaded = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not loaded.unexpected_keys
    assert set(loaded.missing_keys) <= {"embed_tokens.weight", "d2t", "t2d"}
    model.embed_tokens.weight.data = drafter.borrowed.embeddings.weight.data
    model.init_tree()
    tokens, _, mask, depths = model.topK_genrate(features, text, None, None)
    mask, depths = mask[0, 0].bool(), depths.tolist()
    parents = [
        next(a for a in range(node) if mask[node, a] and depths[a] == depths[node] - 1) - 1
        for node in range(1, len(depths))
    ]
    return Grown(tokens[0, 1:].tolist(), parents, depths[1:])


def ours(drafter: EagleDrafter, text, features) -> Grown:
    """By the library, greedy."""
    length = torch.tensor([text.shape[1] - 1])
    where = {"vocab_size": VOCAB, "device": torch.device("cpu")}
    count = drafter.num_draft_tokens
    state = drafter.init_state(1, text.shape[1] + count + 1, **where)
    context = Context(text, features, length * 0, length)
    drawing = Drawing(count, LogitsFilter(1, temperature=0), None, draw_by_inversion)
    draft = drafter.propose(context, state, drawing)
    parents, depths = draft.parents[0].tolist(), []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return Grown(draft.tokens[0].tolist(), parents, depths)


@pytest.mark.parametrize(
    "tree", [Tree(4, 1, 6), Tree(12, 3, 3), Tree(31, 5, 8), Tree(59, 6, 10), Tree(40, 8, 4)]
)
@pytest.mark.parametrize("draft_vocab_size", [VOCAB, 12])
@torch.no_grad()
def test_trees_are_those_of_safeailabs_code(tree, draft_vocab_size, tmp_path, monkeypatch):
    config = flagged(WHOLE, draft_vocab_size=draft_vocab_size)
    for seed in range(6):
        head = random_head(config, seed=seed, dtype=torch.float32)
        drafter = EagleDrafter(head, stand_in(config, dtype=torch.float32), tree=tree)
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(1, VOCAB, (1, 4 + 3 * seed), generator=generator)
        features = features_for(config, 1, text.shape[1] - 1, seed).float()
        expected = theirs(tmp_path / str(seed), drafter, tree, text, features, monkeypatch)
        assert ours(drafter, text, features) == expected
        assert len(expected.tokens) == tree.nodes
