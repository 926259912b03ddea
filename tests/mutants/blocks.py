"""Heads that draft a block: corrections inside it, windows, early ends."""

from mutation import Edit, Fault

_PARITY = "drafters/test_parity.py::test_every_draft_is_that_of_the_wiring_recomputed_without_cache"
_SPECFORGE = "SpecForge 0.2.0, modeling/draft/dspark.py"
_KIND = "heads.correction:{}".format

BLOCKS = [
    Fault(
        "a correction reads the last committed token at every place",
        "a trial of this one",
        _PARITY,
        Edit(
            "drafters.mask_token:MaskTokenDrafter.propose",
            "tokens = drafting.draw(widen(paths.follow(i, tokens)))",
            "drafting.draw(widen(paths.follow(i, tokens)))",
        ),
    ),
    Fault(
        "a correction reads the row after its own",
        _SPECFORGE,
        _PARITY,
        Edit(
            "drafters.mask_token:_Paths.follow",
            "rows = logits, self.hidden[:, index : index + 1]",
            "rows = logits, self.hidden[:, -1:]",
        ),
    ),
    Fault(
        "the branches of a tree share one state",
        "a trial of this one",
        "drafters/test_trees.py::test_corrected_nodes_follow_their_own_paths",
        Edit("drafters.mask_token:_Paths.follow", "if above is not None:", "if index == 1:"),
    ),
    Fault(
        "the cell of a fill-in block starts at its first prediction",
        "speculators 0.9.0, models/dspark/core.py",
        _PARITY,
        Edit(
            _KIND("RecurrentMarkov.begin"),
            "for row in range(self.first_row):",
            "for row in range(0):",
        ),
    ),
    Fault(
        "what the selector did not choose keeps its logit",
        "speculators 0.9.0, models/dflash2",
        _PARITY,
        Edit(
            _KIND("Selector.forward"),
            "logits.new_full((*tokens.shape, logits.shape[-1]), -torch.inf)",
            "logits.expand(*tokens.shape, -1).clone()",
        ),
    ),
    Fault(
        "the mean of a block leaves its first row out",
        "a trial of this one",
        _PARITY,
        Edit(
            _KIND("XPress.begin"),
            "block.mean(dim=1, keepdim=True)",
            "block[:, 1:].mean(dim=1, keepdim=True)",
        ),
    ),
    Fault(
        "a convolution reads the row after",
        "a trial of this one",
        _PARITY,
        Edit(
            "heads.layers:BlockConvolution._convolve",
            "F.pad(x, (0, 0, self.taps - 1, 0))",
            "F.pad(x, (0, 0, self.taps - 2, 1))",
        ),
    ),
    Fault(
        "a head's sliding window is left out",
        "speculators#684",
        _PARITY,
        Edit(
            "heads.layers:LayerConfig.attention_options",
            "sliding_window=window",
            "sliding_window=None",
        ),
    ),
    Fault(
        "rows of a block see later ones in layers with a window",
        "vLLM 0.32.0, _dflash_layer_causal",
        _PARITY,
        Edit(
            "heads.layers:LayerConfig.attention_options",
            "is_causal=window is not None and self.is_window_causal",
            "is_causal=False",
        ),
    ),
    Fault(
        "a draft keeps the first token that the head is not sure of",
        "DeepSpec, eval/dspark/draft_ops.py",
        "drafters/test_parity.py::"
        "test_a_draft_ends_before_the_first_token_that_the_head_is_not_sure_of",
        Edit(
            "drafters.mask_token:MaskTokenDrafter._num_valid",
            "is_sure.cumprod(dim=1).sum(dim=1)",
            "is_sure.cumprod(dim=1).sum(dim=1) + 1",
        ),
    ),
]
