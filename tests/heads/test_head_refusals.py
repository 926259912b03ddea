"""What cannot be a head is refused by name, before weights are read or drafts made.

One table per door: fields of a configuration, ids of a head, targets of a drafter.
"""

from dataclasses import replace

import eagle_heads
import mask_heads
import mtp_heads
import pytest
import torch
from architectures import build
from eagle_heads import EAGLE3, flagged, stand_in
from mask_heads import DFLASH, DSPARK, P_EAGLE, PARD
from refusals import refused

from specdec import EagleDrafter, MaskTokenDrafter, MTPDrafter, SpeculativeGenerator
from specdec.drafters import EagleHead, MTPHead
from specdec.drafters.head.layer_config import Convolution, LayerConfig
from specdec.drafters.mask_token.correction import (
    DominoConfig,
    MarkovConfig,
    SelectorConfig,
    XPressConfig,
)
from specdec.drafters.mask_token.lattice import LiLiCorrConfig
from specdec.drafters.mtp.window import PastRows, shift_window
from specdec.types import Context

MTP = mtp_heads.PLAIN
INPUT, NO_FC = {"fusion": "input"}, {"has_fc": False}
ODD_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.2}
NARROW = {"convolution": Convolution(2, 5)}
FIELDS = {
    "'input' or 'attention', got 'output'": (EAGLE3, {"fusion": "output"}),
    "norm_before_fc, fc_norm .. have no meaning": (EAGLE3, INPUT | {"norm_before_fc": True}),
    "norm_before_residual have no meaning": (EAGLE3, INPUT | {"norm_before_residual": True}),
    "has_fc must be True": (EAGLE3, INPUT | NO_FC),
    "48 wide in all and the head is 16 wide": (EAGLE3, INPUT),
    "48 wide in all and the head is": (EAGLE3, NO_FC),
    "need has_fc=True": (EAGLE3, NO_FC | {"feature_layers": (1,), "fc_norm": True}),
    "choose one": (EAGLE3, {"norm_before_fc": True, "fc_norm": True}),
    "1..vocab_size = 23, got 24": (EAGLE3, {"draft_vocab_size": 24}),
    "9 ids cannot use the .. head of 23": (EAGLE3, {"draft_vocab_size": 9, "has_lm_head": False}),
    "3 heads and 2": (EAGLE3, {"num_heads": 3}),
    "num_layers must be >= 1, got 0": (EAGLE3, {"num_layers": 0}),
    "EagleConfig.num_layers": (EAGLE3, {"num_layers": 1.5}),
    "an even part of a head, got head_dim 5": (EAGLE3, {"head_dim": 5}),
    "an even part of a head .. 'partial_rotary_factor': 0.2": (EAGLE3, {"rope": ODD_ROPE}),
    "intermediate_size": (EAGLE3, {"intermediate_size": 0}),
    "num_layers must be an integer >= 1, got 0": (MTP, {"num_layers": 0}),
    "MTPConfig.num_layers": (MTP, {"num_layers": 2.5}),
    "semantics must be 'chain' or 'target', got 'shifted'": (MTP, {"semantics": "shifted"}),
    "feedback_norm feeds the output of the norm back": (MTP, {"output_norm": False}),
    "lm_head_per_depth needs has_lm_head=True": (MTP, {"lm_head_per_depth": True}),
    "alignment must be 'shifted', 'unshifted'": (P_EAGLE, {"alignment": "late"}),
    "alignment='shifted' goes with context='input', got 'keys'": (P_EAGLE, {"context": "keys"}),
    "goes with context='keys', got 'input'": (DFLASH, {"context": "input"}),
    "goes with context='none', got 'keys'": (DFLASH, {"alignment": "unshifted"}),
    "context='input' and feature_layers=() contradict": (P_EAGLE, {"feature_layers": ()}),
    "context='none' and feature_layers=(2,) contradict": (PARD, {"feature_layers": (2,)}),
    "norm_before_fc, fc_norm and norm_before_residual are": (DFLASH, {"fc_norm": True}),
    "are of context='input'": (PARD, {"norm_before_residual": True}),
    "fc_norm .. choose one": (P_EAGLE, {"fc_norm": True, "norm_before_fc": True}),
    " num_layers must be >= 1, got 0": (P_EAGLE, {"num_layers": 0}),
    "mask_token_id must be an id in 0..22, got 23": (P_EAGLE, {"mask_token_id": 23}),
    "ties_embeddings is about tables of the head's own": (P_EAGLE, {"ties_embeddings": True}),
    "block_size is of 'same-position' and 'next-token', not": (P_EAGLE, {"block_size": 4}),
    "need its block_size": (DFLASH, {"block_size": None}),
    "at least 2 rows, got 1": (DFLASH, {"block_size": 1}),
    "at least 1 rows, got 0": (DSPARK, {"block_size": 0}),
    "draft_vocab_size must be in 1..vocab_size = 23, got 24": (P_EAGLE, {"draft_vocab_size": 24}),
    "has_lm_head must be True": (DFLASH, {"draft_vocab_size": 9}),
    "confidence='markov' reads the embeddings of a MarkovConfig, got correction=None": (
        *(DSPARK, {"confidence": "markov"}),
    ),
    "MaskTokenConfig.confidence must be": (DSPARK, {"confidence": "sure"}),
    "a window of LayerConfig.windows": (DSPARK, {"windows": (4, 0)}),
    "LayerConfig.convolution.taps must be": (DSPARK, {"convolution": Convolution(0, 4)}),
    "hidden_size 16 must be a multiple of a convolution's group, got 5": (DSPARK, NARROW),
}


@pytest.mark.parametrize("message", FIELDS)
def test_a_configuration_that_cannot_be_is_refused(message):
    config, flags = FIELDS[message]
    with refused(message.strip()):
        flagged(config, **flags)


CORRECTIONS = {
    "MarkovConfig.rank must be .. 1 .. got 0": (MarkovConfig, (0,)),
    "MarkovConfig.rank must be an integer, got 2.0": (MarkovConfig, (2.0,)),
    "MarkovConfig.kind must be 'vanilla'": (MarkovConfig, (2, "lstm")),
    "DominoConfig.gru_width must be": (DominoConfig, (2, 0)),
    "DominoConfig.first must be": (DominoConfig, (2, 2, -1)),
    "SelectorConfig.top_k must be": (SelectorConfig, (2, 0)),
    "XPressConfig.mlp_ratio must be": (XPressConfig, (2, 0)),
    "LiLiCorrConfig.top_k must be": (LiLiCorrConfig, (0,)),
    "LiLiCorrConfig.width must be .. 0 .. got -1": (LiLiCorrConfig, (4, -1)),
    "LiLiCorrConfig.mlp_ratio must be .. got 0": (LiLiCorrConfig, (4, 0, 2, 2, 0)),
    "LiLiCorrConfig.vector_eps must be .. got 0": (LiLiCorrConfig, (4, 0, 2, 2, 2, 4, 0)),
    "LiLiCorrConfig.scale must be .. got nan": (
        LiLiCorrConfig,
        (4, 0, 2, 2, 2, 4, 1e-4, float("nan")),
    ),
}


@pytest.mark.parametrize("message", CORRECTIONS)
def test_sizes_of_a_correction_that_cannot_be_are_refused(message):
    make, sizes = CORRECTIONS[message]
    with refused(message):
        make(*sizes)
    assert DominoConfig(2, 3, first=0).first == 0  # corrects from the first token on


FEW = eagle_heads.WIRINGS["fewer ids"]
EVIL = flagged(EAGLE3, hidden_act="evil")
SMALL_SELECTOR = replace(DSPARK, draft_vocab_size=9, correction=SelectorConfig(2, 4))
HEADS = [
    (lambda: EagleHead(FEW, None), "9 ids for a target of 23 needs target_ids"),
    (lambda: EagleHead(FEW, torch.arange(8)), "9 int64 ids"),
    (lambda: EagleHead(FEW, torch.arange(9).int()), "9 int64 ids"),
    (lambda: EagleHead(FEW, torch.arange(15, 24)), "0..22"),
    (lambda: EagleHead(FEW, torch.arange(9) - 1), "0..22"),
    (lambda: EagleHead(FEW, torch.zeros(9, dtype=torch.long)), "1 distinct"),
    (lambda: EagleHead(EVIL), "hidden_act"),
    (lambda: MTPHead(MTP, torch.arange(3)), "proposes all ids"),
    (lambda: mtp_heads.random_head(MTP).fuse(torch.zeros(1, 2, 5)), "one feature of width 16, and"),
    (lambda: mask_heads.random_head(SMALL_SELECTOR), "4 candidates needs .. of 23 ids .. has 9"),
    (
        lambda: mask_heads.random_head(replace(DFLASH, correction=SelectorConfig(2, 24))),
        "a selector of 24 candidates needs",
    ),
    (
        lambda: mask_heads.random_head(replace(P_EAGLE, correction=XPressConfig(2))),
        "XPress mixes the rows of a block",
    ),
    (
        lambda: mask_heads.random_head(replace(DSPARK, correction=LiLiCorrConfig(4))),
        "a lattice is of blocks with alignment='same-position' and block_size",
    ),
    (
        lambda: mask_heads.random_head(replace(DFLASH, correction=LiLiCorrConfig(4, 6))),
        "num_heads must divide the width 6, got 8",
    ),
    (
        lambda: mask_heads.random_head(replace(DFLASH, correction=LiLiCorrConfig(24))),
        "a lattice of 24 candidates needs",
    ),
    (lambda: LayerConfig(8, 0, num_heads=2, num_kv_heads=2, head_dim=4), "intermediate_size"),
]


@pytest.mark.parametrize(("make", "message"), HEADS)
def test_a_head_that_does_not_fit_its_parts_is_refused(make, message):
    with refused(message):
        make()


# Drafters of a head.

DRAFTERS = {
    "EagleHead": (EagleDrafter, eagle_heads.random_drafter("eagle3")),
    "MaskTokenHead": (MaskTokenDrafter, mask_heads.random_drafter("p-eagle")),
    "MTPHead": (MTPDrafter, mtp_heads.random_drafter("chain")),
}
TARGETS = {name: stand_in(drafter.config) for name, (_, drafter) in DRAFTERS.items()}


@pytest.mark.parametrize("own", DRAFTERS)
def test_what_is_no_head_of_a_drafters_design_is_refused(own):
    """Heads of other designs with the drafter that takes them; a drafter; no weights."""
    drafter_class, drafter = DRAFTERS[own]
    for other in DRAFTERS.keys() - {own}:
        with refused(f"{own} .. {other} .. {DRAFTERS[other][0].__name__}"):
            drafter_class(DRAFTERS[other][1].head, TARGETS[own])
    with refused(drafter_class.__name__):
        drafter_class(drafter, TARGETS[own])
    ids = () if own == "MTPHead" else (drafter.head.target_ids,)
    with refused(f"{own} .. meta"):
        drafter_class(type(drafter.head)(drafter.config, *ids).to("meta"), TARGETS[own])


WIDER = flagged(EAGLE3, target_hidden_size=20)
NO_TABLE = flagged(WIDER, has_embed_tokens=True, has_lm_head=False)
MISFITS = [
    (EAGLE3, flagged(EAGLE3, vocab_size=29, draft_vocab_size=29), "23 .. 29"),
    (EAGLE3, WIDER, "16 .. 20"),
    (WIDER, WIDER, "16 wide and has no embeddings .. width of 20"),
    (NO_TABLE, WIDER, "16 wide and has no vocabulary head .. width of 20"),
]


@pytest.mark.parametrize(("config", "other", "message"), MISFITS)
def test_a_head_that_was_made_for_another_target_is_refused_naming_both(config, other, message):
    with refused(message):
        EagleDrafter(eagle_heads.random_head(config), stand_in(other))


def test_a_drafter_is_refused_by_a_generator_with_another_target():
    drafter, where = DRAFTERS["EagleHead"][1], {"vocab_size": 23, "device": torch.device("cpu")}
    drafter.validate(**where)
    with refused("vocabulary of 23 and the target's is 61"):
        SpeculativeGenerator(build("llama"), drafter)
    with refused("on cpu and the target on cuda .. drafter.to('cuda')"):
        drafter.validate(**where | {"device": torch.device("cuda")})
    with refused("num_draft_tokens must be an integer >= 0, got -1"):
        eagle_heads.random_drafter("eagle3", -1)


@pytest.mark.parametrize("own", ["EagleHead", "MaskTokenHead"])
def test_a_context_without_features_or_with_others_is_refused(own):
    drafter = DRAFTERS[own][1]
    state = drafter.init_state(1, 20, vocab_size=23, device=torch.device("cpu"))
    one = torch.tensor([1])
    context = Context(torch.tensor([[3, 1]]), None, 0 * one, one)
    with refused("needs the target's features .. brings none"):
        drafter.prefill(context, state)
    with refused("48 in all .. 5 wide .. another target"):
        drafter.prefill(replace(context, features=torch.zeros(1, 1, 5)), state)


def test_windows_of_prediction_modules_that_do_not_fit_are_refused():
    """Rows to remember of features 5 wide."""
    two = torch.tensor([1, 1])
    context = Context(torch.ones(2, 4).long(), torch.ones(2, 3, 5), 0 * two, two)
    past = PastRows(torch.ones(2, 4).long(), torch.ones(2, 4, 5))
    bare, narrow = replace(context, features=None), past._replace(features=past.features[..., :4])
    for case, width, message in (
        ((context, past), 3, "a window of 3 rows cannot hold the 4 rows"),
        ((context, narrow), 4, "4 wide and the context's 5"),
        ((bare, past), 4, "a context with features"),
    ):
        with refused(message):
            shift_window(*case, width, padding_slot=64)
