"""What corrections and windowed layers refuse; what they compute is held to a reference in
`drafters/test_mask_token_parity.py` and to their authors' code in `foreign/test_block_heads.py`.
"""

from dataclasses import replace

import pytest
from mask_heads import DFLASH, DSPARK, LAYER, P_EAGLE, random_head

from specdec.heads.correction import DominoConfig, MarkovConfig, SelectorConfig, XPressConfig
from specdec.heads.layers import Convolution


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MarkovConfig(0), ValueError, r"MarkovConfig.rank must be .*1.* got 0"),
        (lambda: MarkovConfig(2.0), TypeError, "MarkovConfig.rank must be an integer, got 2.0"),
        (lambda: MarkovConfig(2, "lstm"), ValueError, "MarkovConfig.kind must be 'vanilla'"),
        (lambda: DominoConfig(2, 0), ValueError, "DominoConfig.gru_width must be"),
        (lambda: DominoConfig(2, 2, -1), ValueError, "DominoConfig.first must be"),
        (lambda: SelectorConfig(2, 0), ValueError, "SelectorConfig.top_k must be"),
        (lambda: XPressConfig(2, 0), ValueError, "XPressConfig.mlp_ratio must be"),
        (lambda: replace(LAYER, windows=(4, 0)), ValueError, "a window of LayerConfig.windows"),
        (
            lambda: replace(LAYER, convolution=Convolution(0, 4)),
            ValueError,
            "LayerConfig.convolution.taps must be",
        ),
        (
            lambda: replace(LAYER, convolution=Convolution(2, 5)),
            ValueError,
            "hidden_size 16 must be a multiple of a convolution's group, got 5",
        ),
        (
            lambda: replace(DSPARK, confidence="markov"),
            ValueError,
            "confidence='markov' reads the embeddings of a MarkovConfig, got correction=None",
        ),
        (
            lambda: replace(DSPARK, confidence="sure"),
            ValueError,
            "MaskTokenConfig.confidence must be",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_domino_head_may_correct_from_the_first_token_on():
    assert DominoConfig(2, 3, first=0).first == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            replace(DSPARK, draft_vocab_size=9, correction=SelectorConfig(2, 4)),
            "a selector of 4 candidates needs the target's whole vocabulary of 23 ids.*has 9",
        ),
        (replace(DFLASH, correction=SelectorConfig(2, 24)), "a selector of 24 candidates needs"),
        (replace(P_EAGLE, correction=XPressConfig(2)), "XPress mixes the rows of a block"),
    ],
)
def test_a_head_that_a_correction_does_not_fit_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        random_head(config)
