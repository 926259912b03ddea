"""Heads with a correction inside the block, beside their authors' models: speculators (DSpark,
DFlash 2, XPress, sliding windows) and SpecForge (DSpark, Domino), on the same random files.

A file that they save is loaded by us, we draft once after a text, and their training forward reads
the same text with our draft as labels: probabilities of every draft token are equal. Neither is
among the package's dependencies: `pip install speculators specforge`, the latter with `--no-deps`.
"""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from architectures import VOCAB, build
from eagle_heads import features_and_logits
from mask_heads import head_for

from specdec import MaskTokenDrafter, SpeculativeGenerator

BLOCK, MASK, LENGTH = 5, 7, 12
pytestmark = pytest.mark.slow


def randomise(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else noise * noise.shape[-1] ** -0.5)
    return model.eval()


def layers(**keys):
    config = transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        vocab_size=VOCAB,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        **keys,
    )
    config._attn_implementation = "eager"
    return config


def drafted(drafter, target, ids):
    """The draft after a text, with its probabilities."""
    seen, method = [], drafter.propose

    def recorded(*args):
        seen.append(method(*args))
        return seen[-1]

    drafter.propose = recorded
    generator = SpeculativeGenerator(target, drafter)
    seen.clear()  # what trials proposed
    generator.generate(ids, max_new_tokens=9, do_sample=True, top_k=0, seed=3)
    return seen[0].tokens[0], seen[0].probs[0]


def text():
    return torch.randint(1, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0))


def assert_same(probs, logits):
    expected = logits.softmax(-1)
    torch.testing.assert_close(probs, expected, rtol=0, atol=1e-5)
    assert probs.argmax(-1).tolist() == expected.argmax(-1).tolist()


# speculators.


def speculators_model(kind, **fields):
    pytest.importorskip("speculators")
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.models.dflash2.config import DFlash2SpeculatorConfig
    from speculators.models.dflash2.core import DFlash2DraftModel
    from speculators.models.dspark.config import DSparkSpeculatorConfig
    from speculators.models.dspark.core import DSparkDraftModel
    from speculators.models.xpress.config import XPressSpeculatorConfig
    from speculators.models.xpress.core import XPressDraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    config_class, model_class = {
        "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
        "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel),
        "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
        "xpress": (XPressSpeculatorConfig, XPressDraftModel),
    }[kind]
    config = config_class(
        transformer_layer_config=layers(**fields.pop("layers", {})),
        draft_vocab_size=VOCAB,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        aux_hidden_state_layer_ids=[1, 2],
        block_size=BLOCK,
        mask_token_id=MASK,
        **fields,
    )
    return randomise(model_class(config))


def corrected(kind, theirs, hidden, logits, block, before):
    """Their logits of a block, given its tokens and the one before it."""
    first = before if kind == "xpress" else block[:1]
    previous = block if theirs.config.sample_from_anchor else torch.cat([first, block[:-1]])
    previous = previous[None]
    if kind == "dspark":
        bias = theirs.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
        return (logits + bias)[0]
    if kind == "xpress":
        return (logits + theirs.refiner_head.block_bias(previous, hidden))[0]
    if kind == "dflash2":
        ids, scores = theirs.candidate_selector.select(logits, hidden, previous)
        return torch.full_like(logits, -torch.inf).scatter(-1, ids, scores)[0]
    return logits[0]


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
CASES = {
    "dflash": ("dflash", {}),
    "vanilla": ("dspark", {"markov_rank": 3}),
    "gated": ("dspark", {"markov_rank": 3, "markov_head_type": "gated"}),
    "rnn": ("dspark", {"markov_rank": 3, "markov_head_type": "rnn"}),
    "dflash2": ("dflash2", {"selector_rank": 4, "selector_top_k": 6, "conv_group_size": 4}),
    "three taps": (
        "dflash2",
        {"selector_rank": 4, "selector_top_k": 9, "conv_kernel_size": 3, "conv_group_size": 8},
    ),
    "xpress": ("xpress", {"xpress_rank": 4}),
    "causal window": ("dflash", {"layers": SLIDING | {"sliding_window": 40}}),
    "window both ways": (
        "dflash",
        {"layers": SLIDING | {"sliding_window": 40}, "sliding_window_non_causal": True},
    ),
}


@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_speculators_predicts_the_same(name, from_anchor, tmp_path, monkeypatch):
    kind, fields = CASES[name]
    target, ids = build("llama"), text()
    theirs = speculators_model(kind, sample_from_anchor=from_anchor, **fields)
    theirs.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    theirs.lm_head.weight.copy_(target.get_output_embeddings().weight)
    theirs.save_pretrained(tmp_path)
    count = BLOCK if from_anchor else BLOCK - 1
    ours = MaskTokenDrafter.from_pretrained(tmp_path, target, count)
    tokens, probs = drafted(ours, target, ids)

    # Their training forward with one root, the last token of the text.
    from speculators.models.dflash import core

    features, _ = features_and_logits(target, ids, (1, 2))
    block = torch.cat([ids[0, -1:], tokens])[:BLOCK]
    padded = F.pad(torch.cat([ids[0, :-1], block]), (0, 2))[None]
    hidden = F.pad(features, (0, 0, 0, padded.shape[1] - LENGTH))
    roots = torch.tensor([LENGTH - 1]), torch.tensor([True])
    monkeypatch.setattr(core, "select_anchors", lambda *_: roots)
    width = padded.shape[1]
    states, logits, *_ = theirs._backbone_forward(
        hidden,
        padded,
        torch.ones(1, width),
        torch.zeros(1, width, 32),
        torch.zeros(1, width, dtype=torch.long),
        max_anchors=1,
    )
    logits = corrected(kind, theirs, states, logits, block, ids[0, -2:-1])
    assert_same(probs, logits[0 if from_anchor else 1 :][:count])


@pytest.mark.parametrize("name", ["dspark, rnn", "dflash, markov", "dflash2", "xpress"])
def test_speculators_reads_what_we_write(name, tmp_path):
    speculators = pytest.importorskip("speculators")
    target = build("llama")
    target.save_pretrained(tmp_path / "target")
    target = type(target).from_pretrained(tmp_path / "target").eval()
    head = head_for(target, name)
    drafter = MaskTokenDrafter(head, target, 3)
    drafter.save_pretrained(tmp_path / "head", "speculators")
    theirs = speculators.SpeculatorModel.from_pretrained(str(tmp_path / "head"))
    theirs.save_pretrained(tmp_path / "again")
    back = MaskTokenDrafter.from_pretrained(tmp_path / "again", target, 3)
    assert replace(back.config, has_lm_head=head.config.has_lm_head) == head.config
    for key, tensor in head.state_dict().items():
        if key != "lm_head.weight":  # of all ids: they take the verifier's
            assert back.head.state_dict()[key].equal(tensor), key


# SpecForge.


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("dspark", {"markov_rank": 3, "markov_head_type": "vanilla"}),
        ("dspark", {"markov_rank": 3, "markov_head_type": "gated"}),
        ("dspark", {"markov_rank": 3, "markov_head_type": "rnn", "enable_confidence_head": True}),
        ("domino", {"emb_dim": 5, "gru_hidden_dim": 6, "pure_draft_prefix_len": 1}),
        ("domino", {"emb_dim": 5, "gru_hidden_dim": 6, "shift_label": True}),
        (
            "domino",
            {
                "emb_dim": 5,
                "gru_hidden_dim": 6,
                "pure_draft_prefix_len": 2,
                "shift_label": True,
            },
        ),
    ],
)
@torch.no_grad()
def test_specforge_predicts_the_same(name, head, tmp_path):
    pytest.importorskip("specforge")
    with contextlib.redirect_stderr(None):
        from specforge.modeling.draft.domino import DominoDraftModel
        from specforge.modeling.draft.dspark import DSparkDraftModel

    target, ids = build("llama"), text()
    config = layers(layer_types=["full_attention"] * 2)
    config.block_size, config.num_target_layers = BLOCK, target.config.num_hidden_layers
    config.architectures = ["DominoDraftModel" if name == "domino" else "DSparkDraftModel"]
    config.dflash_config = {"mask_token_id": MASK, "target_layer_ids": [0, 1], **head}
    config.dflash_config["projector_type"] = name
    theirs = randomise((DominoDraftModel if name == "domino" else DSparkDraftModel)(config))
    theirs.save_pretrained(tmp_path)
    is_shifted = name == "dspark" or head.get("shift_label", False)
    count = BLOCK if is_shifted else BLOCK - 1
    ours = MaskTokenDrafter.from_pretrained(tmp_path, target, count)
    tokens, probs = drafted(ours, target, ids)

    features, _ = features_and_logits(target, ids, (1, 2))
    block = torch.cat([ids[:, -1:], tokens[None]], dim=1)[:, :BLOCK]
    table, anchor_and_masks = target.get_input_embeddings(), torch.full((1, BLOCK), MASK)
    anchor_and_masks[:, 0] = ids[:, -1]
    states = theirs(
        torch.arange(LENGTH - 1 + BLOCK)[None],
        noise_embedding=table(anchor_and_masks),
        target_hidden=features[:, : LENGTH - 1],
    )
    logits = target.get_output_embeddings()(states)
    final = theirs.apply_logits_head(
        logits[:, None],
        prev_token_ids=block[:, None],
        prev_token_embeddings=table(block)[:, None],
        hidden_states=states[:, None],
    )[0, 0]
    assert_same(probs, final[0 if is_shifted else 1 :][:count])
    if head.get("enable_confidence_head"):
        estimates = theirs.predict_confidence(states)[0].sigmoid()
        for threshold in (0.0, float(estimates[1:].min()) + 1e-4, 1.0):
            is_sure = (estimates >= threshold).long()
            sure = MaskTokenDrafter.from_pretrained(
                tmp_path, target, count, confidence_threshold=threshold
            )
            seen, method = [], sure.propose
            sure.propose = lambda *args, seen=seen, method=method: (
                seen.append(method(*args)) or seen[-1]
            )
            generator = SpeculativeGenerator(target, sure)
            seen.clear()
            generator.generate(ids, max_new_tokens=9, do_sample=False)
            assert int(seen[0].num_valid[0]) == int(is_sure.cumprod(0).sum())
