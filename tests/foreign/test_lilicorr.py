"""LiLiCorr heads beside their trainer's model (Model-Optimizer, its exporter as well) and SGLang's
head and walk: drafts have the same probabilities.

SGLang needs a GPU where it is imported, so its classes are taken out of its files with plain layers
for its own. Neither is among the package's dependencies: `pip install nvidia-modelopt sglang`, 0.48
and 0.5.23, `--no-deps` is enough (with `omegaconf pulp nvidia-ml-py scipy`).
"""

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from architectures import VOCAB, build
from eagle_heads import features_and_logits
from mask_heads import WIRINGS, random_head
from test_block_heads import BLOCK, LENGTH, MASK, drafted, layers, randomise, text
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from specdec import MaskTokenDrafter
from specdec.drafters.mask_token.correction import DraftBlock, DraftRow

pytestmark = pytest.mark.slow
LATTICE = {
    **{"lilicorr_candidate_topk": 4, "lilicorr_hidden_size": 24, "lilicorr_num_layers": 2},
    **{"lilicorr_num_heads": 3, "lilicorr_mlp_ratio": 1.5, "lilicorr_factor_dim": 5},
    **{"lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": 7.5, "projector_type": "lilicorr"},
}
CASES = {
    "plain": {},
    "as wide as the drafter": {"lilicorr_hidden_size": 32, "lilicorr_num_heads": 4},
    "convolutions": {"conv_kernel_size": 3, "conv_group_size": 8},
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_the_trainers_model_predicts_the_same(name, tmp_path):
    pytest.importorskip("modelopt", minversion="0.48.0rc1")
    from modelopt.torch.export.plugins.hf_spec_export import LiLiCorrExporter
    from modelopt.torch.speculative.plugins.modeling_lilicorr import LiLiCorrModule

    target, ids = build("llama"), text()
    config = layers(layer_types=["full_attention"] * 2)
    for key, value in (LATTICE | CASES[name]).items():
        setattr(config, key, value)
    config.block_size, config.target_layer_ids, config.sliding_window = BLOCK, [0, 1], None
    theirs = randomise(LiLiCorrModule(config))
    theirs.rotary_emb = Qwen3RotaryEmbedding(config)  # it would pass a device, as of transformers 4
    whole = nn.Module()
    whole.dflash_module, whole.config, whole.dflash_config = theirs, target.config, config
    whole.dflash_block_size, whole.mask_token_id, whole.target_layer_ids = BLOCK, MASK, [0, 1]
    LiLiCorrExporter(whole).export(tmp_path)
    ours = MaskTokenDrafter.from_pretrained(tmp_path, target, BLOCK - 1)
    tokens, probs = drafted(ours, target, ids)

    features = features_and_logits(target, ids, (1, 2))[0][:, : LENGTH - 1]
    table, block = target.get_input_embeddings(), torch.full((1, BLOCK), MASK)
    block[:, 0] = ids[:, -1]
    states = theirs(table(block), features, torch.arange(LENGTH - 1 + BLOCK)[None])[:, 1:]
    best, candidates = target.lm_head(states).log_softmax(-1).topk(4)
    start, pairs = theirs.score_lattice(
        candidate_token_ids=candidates[:, None],
        candidate_log_probs=best[:, None],
        pass_hidden=states[:, None],
        embed_tokens=table,
        target_hidden=features,
        anchor_positions=torch.tensor([[LENGTH - 1]]),
    )
    scales = theirs.lilicorr.compose_log_factors
    start, pairs = scales(start_scores=start[0, 0], pair_scores=pairs[0, 0])
    row, differences = start, []
    for i, token in enumerate(tokens):
        expected = torch.zeros(VOCAB).scatter(0, candidates[0, i], row.softmax(-1))
        differences.append((probs[i] - expected).abs().max())
        assert int(token) in candidates[0, i]
        if i < BLOCK - 2:
            row = pairs[i, int((candidates[0, i] == token).nonzero())]
    print(f"{name}: largest difference of probabilities {max(differences):.1e}")
    assert max(differences) < 1e-5


class Replicated(nn.Linear):
    """A linear layer with SGLang's arguments and its pair of results."""

    def __init__(self, width, out, **others):
        super().__init__(width, out)

    def forward(self, x):
        return super().forward(x), None


def sglangs():
    """What its files define, without importing it."""
    found = find_spec("sglang")
    files = "srt/models/lilicorr.py", "kernels/ops/speculative/lilicorr.py"
    paths = [] if found is None else [Path(found.origin).parent / name for name in files]
    if not paths or not all(path.is_file() for path in paths):
        pytest.skip("no sglang with LiLiCorr")
    wanted = {
        *("_apply_2d", "LiLiCorrMLP", "LiLiCorrLatticeAttention", "LiLiCorrLayer"),
        *("LiLiCorrHead", "_lattice_scores", "_selector_walk_torch", "lilicorr_sample_path"),
    }
    trees = [ast.parse(path.read_text()) for path in paths]
    body = [node for tree in trees for node in tree.body if getattr(node, "name", "") in wanted]
    assert {node.name for node in body} == wanted
    names = {
        "torch": torch,
        "F": F,
        "nn": nn,
        "RMSNorm": nn.RMSNorm,
        "ReplicatedLinear": Replicated,
    }
    names |= {"add_prefix": lambda name, prefix: "", "_runs_fp4_marlin": lambda module: False}
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([future, *body], []))
    exec(compile(module, "sglang", "exec"), names)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("name", ["lilicorr", "lilicorr, convolutions"])
@torch.no_grad()
def test_sglangs_head_and_walk_have_the_same_probabilities(name, temperature):
    """The walk's own path, on tensors of any kind; without `token_proj` in the second one."""
    code, config = sglangs(), WIRINGS[name]
    ours, sizes = random_head(config, dtype=torch.float32).correction, config.correction
    theirs = code.LiLiCorrHead(
        model_hidden_size=config.hidden_size,
        block_size=config.block_size,
        rms_norm_eps=config.layer.rms_norm_eps,
        config=SimpleNamespace(
            resolve_hidden_size=lambda model_hidden_size: sizes.width or model_hidden_size,
            **{"candidate_topk": sizes.top_k, "logit_scale": sizes.scale},
            **vars(sizes),
        ),
    ).eval()
    theirs.load_state_dict(ours.state_dict())
    theirs.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    rng, rows, slots = torch.Generator().manual_seed(2), 4, config.block_size - 1
    logits = 3 * torch.randn(rows, slots, config.vocab_size, generator=rng)
    hidden = torch.randn(rows, slots, config.hidden_size, generator=rng)
    feature = torch.randn(rows, config.hidden_size, generator=rng)
    table = torch.randn(config.vocab_size, config.hidden_size, generator=rng)
    best, ids = logits.log_softmax(-1).topk(sizes.top_k)
    tokens, expected = theirs.select_with_proposal(
        token_embeddings=table[ids],
        candidate_tokens=ids,
        candidate_log_probs=best,
        pass_hidden=hidden,
        anchor_hidden=feature,
        anchor_valid=torch.ones(rows, dtype=torch.bool),
        uniforms=torch.rand(rows, slots, generator=rng),
        temperatures=torch.full((rows,), max(temperature, 1e-5)),
        greedy_mask=torch.full((rows,), temperature == 0),
    )

    embed = lambda tokens: table[tokens]  # noqa: E731
    block, state = ours.read(DraftBlock(logits, hidden, feature, embed)), torch.zeros(rows, 1, 0)
    before = torch.cat([torch.zeros(rows, 1, dtype=torch.long), tokens], dim=1)
    for i in range(slots):
        at = logits[:, i : i + 1], hidden[:, i : i + 1], before[:, i : i + 1], state, embed, block
        row = ours(DraftRow(i, *at))[0][:, 0]
        if temperature == 0:
            assert row.argmax(-1).equal(tokens[:, i])
            continue
        found = (row / temperature).softmax(-1).gather(1, ids[:, i])
        torch.testing.assert_close(found, expected[:, i], rtol=0, atol=2e-6)
