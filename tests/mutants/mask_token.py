"""Mutants of mask-token heads, of the window op, and of the drafter that runs both."""

from mutation import Mutant

WINDOW = "kernels/test_kernels_mask_window.py::"
LISTS = f"{WINDOW}test_a_window_is_what_lists_say"


def wiring_test(name: str) -> str:
    """Every draft against a recomputation without cache."""
    test = "test_every_draft_is_that_of_the_wiring_recomputed_without_cache"
    return f"drafters/test_mask_token_parity.py::{test}[{name}]"


MASK_TOKEN = [
    Mutant(
        name="rows of rejected tokens are written",
        source="vllm#26498, Blaizzy/mlx-vlm#1155 (rows 50, 51)",
        file="kernels/mask_window/reference.py",
        old="is_real = columns < counts[:, None]",
        new="is_real = columns < committed.shape[1] + 0 * counts[:, None]",
        caught_by=LISTS,
    ),
    Mutant(
        name="rejected tokens count where the masks begin",
        source="vllm-project/vllm#32628, HabanaAI/vllm-fork#1780 (rows 50, 52)",
        file="kernels/mask_window/reference.py",
        old="first_later = start + counts",
        new="first_later = start + committed.shape[1] + 0 * counts",
        caught_by=f"{WINDOW}test_rejected_tokens_have_no_part_in_anything",
    ),
    Mutant(
        name="positions past the end wrap to the start",
        source="vllm-project/vllm#32628 (row 58)",
        file="kernels/mask_window/reference.py",
        old="slots=torch.where(is_written, positions, spec.trash)",
        new="slots=torch.where(is_written, positions, spec.trash) % spec.max_positions",
        caught_by=f"{WINDOW}test_nothing_is_written_at_or_past_the_limit_and_nothing_wraps",
    ),
    Mutant(
        name="masks past the end are written",
        source="vllm#16087 (row 58)",
        file="kernels/mask_window/reference.py",
        old="is_written = is_written & (positions < spec.max_positions)",
        new="is_written = is_written & (positions <= spec.max_positions)",
        caught_by=f"{WINDOW}test_nothing_is_written_at_or_past_the_limit_and_nothing_wraps",
    ),
    Mutant(
        name="drafts past the end are valid",
        source="vllm#38711 (row 59)",
        file="kernels/mask_window/reference.py",
        old="room = spec.max_positions - (first_later + spec.first_row)",
        new="room = spec.max_positions - (start + spec.first_row)",
        caught_by=f"{WINDOW}test_fewer_draft_tokens_are_valid_near_the_limit_one_by_one",
    ),
    Mutant(
        name="a row without features proposes from garbage",
        source="sglang#19796 (row 39)",
        file="kernels/mask_window/reference.py",
        old="torch.where(counts > 0, room.clamp(0, spec.num_draft_tokens), 0)",
        new="room.clamp(0, spec.num_draft_tokens)",
        caught_by=f"{WINDOW}test_a_row_of_which_nothing_was_read_proposes_nothing_and_writes_nothing",
    ),
    Mutant(
        name="the kernel writes masks past the end",
        source="vllm#16087 (row 58)",
        file="kernels/mask_window/triton.py",
        old="is_written = (is_real | (is_later & (count > 0))) & (position < max_positions)",
        new="is_written = is_real | (is_later & (count > 0))",
        caught_by=f"{WINDOW}test_the_kernel_is_its_definition",
    ),
    Mutant(
        name="the kernel reads the last token of another row",
        source="vllm#14645 (row 48)",
        file="kernels/mask_window/triton.py",
        old="source = tokens + tl.cast(row, tl.int64) * (num_committed + shift)",
        new="source = tokens + tl.cast(row, tl.int64) * num_committed",
        caught_by=f"{WINDOW}test_the_kernel_is_its_definition",
    ),
    Mutant(
        name="tokens stand beside their own features",
        source="vllm#15901, mlc-llm#2664 (rows 41, 42)",
        file="kernels/mask_window/reference.py",
        old="torch.where(is_real, committed, 0), masks], dim=1)",
        new="torch.where(is_real, tokens[:, : committed.shape[1]], 0), masks], dim=1)",
        caught_by=wiring_test("p-eagle"),
    ),
    Mutant(
        name="DFlash's rows are read as predicting the next token",
        source="deepseek-ai/DeepSpec: dflash_*_block7 beside z-lab's files",
        file="heads/mask_token.py",
        old='"same-position": Rows(shift=1, opens_with_last=True, first_row=1),',
        new='"same-position": Rows(shift=1, opens_with_last=True, first_row=0),',
        caught_by="drafters/test_mask_token_foreign.py::"
        "test_dflash_proposes_what_transformers_proposes_over_a_whole_generation[llama-5]",
    ),
    Mutant(
        name="PARD's text is shifted like EAGLE's",
        source="vllm-project/vllm#32887",
        file="heads/mask_token.py",
        old='"unshifted": Rows(shift=0, opens_with_last=False, first_row=-1),',
        new='"unshifted": Rows(shift=1, opens_with_last=False, first_row=-1),',
        caught_by="drafters/test_mask_token_foreign.py::test_pard_proposes_what_a_straight_forward_"
        "over_tokens_and_masks_does[Llama-61-False]",
    ),
    Mutant(
        name="rows of a block see only what precedes them",
        source="vllm: DFlash needs a backend without causal masks",
        file="drafters/mask_token.py",
        old="return any_of(causal, block(first, last))",
        new="return causal",
        caught_by=wiring_test("dflash"),
    ),
    Mutant(
        name="a block is as wide as K asks for",
        source="z-lab/dflash: block_size",
        file="heads/mask_token.py",
        old="return self.block_size or self.rows.first_row + num_draft_tokens",
        new="return self.rows.first_row + num_draft_tokens",
        caught_by=wiring_test("dflash"),
    ),
    Mutant(
        name="the step attends to fewer slots than the block has",
        source="vllm#41162, vllm#46849 (row 87)",
        file="drafters/mask_token.py",
        old="num_attended=context.num_attended + max(spec.num_later - num_draft_tokens - 1, 0),",
        new="num_attended=context.num_attended - num_draft_tokens,",
        caught_by="drafters/test_mask_token_foreign.py::"
        "test_dflash_proposes_what_transformers_proposes_over_a_whole_generation[llama-9]",
    ),
    Mutant(
        name="masks get the last feature instead of their own",
        source="AMD-AGI/PARD: PARD-2 repeats it, P-EAGLE does not",
        file="heads/mask_token.py",
        old="masks = joined[:, -1:].expand(-1, num_masks, -1)",
        new="masks = joined[:, -2:-1].expand(-1, num_masks, -1)",
        caught_by=wiring_test("p-eagle"),
    ),
    Mutant(
        name="context features skip the norm after fc",
        source="z-lab/dflash: hidden_norm",
        file="heads/mask_token.py",
        old="return self.hidden_norm(self.fuse(features))",
        new="return self.fuse(features)",
        caught_by=wiring_test("dflash"),
    ),
    Mutant(
        name="queries of a block are turned to the positions of the context",
        source="vllm: RoPE of DFlash's queries and keys",
        file="heads/layers.py",
        old="cos, sin = (part[:, :, context.shape[1] :] for part in (cos, sin))",
        new="cos, sin = (part[:, :, : x.shape[1]] for part in (cos, sin))",
        caught_by=wiring_test("dspark"),
    ),
    Mutant(
        name="later layers get no context",
        source="z-lab/dflash: every layer reads it",
        file="heads/mask_token.py",
        old="out = layer(out, angles, attend, context)",
        new="out = layer(out, angles, attend)",
        caught_by=wiring_test("dflash"),
    ),
    Mutant(
        name="DFlash's layer ids are read as boundaries",
        source="vllm#40727",
        file="checkpoints/mask_token.py",
        old='"dflash_config.target_layer_ids", self.flash.get("target_layer_ids"), "layer_output"',
        new='"dflash_config.target_layer_ids", self.flash.get("target_layer_ids"), "boundary"',
        caught_by="checkpoints/test_mask_token_checkpoints.py::"
        "test_a_checkpoint_is_read_as_its_producer_means_it[z-lab]",
    ),
    Mutant(
        name="a checkpoint without the id of its mask gets one",
        source="SpecForge: PEagleDraftModel's configuration names none",
        file="checkpoints/mask_token.py",
        old="if not named:",
        new="""\
if not named:
            return 0
        if text is named:""",
        caught_by="checkpoints/test_mask_token_checkpoints.py::"
        "test_a_checkpoint_that_contradicts_itself_is_refused",
    ),
    Mutant(
        name="DSpark's Markov head is left out in silence",
        source="sgl-project/SpecForge: DSpark's sampling and labels disagree",
        file="checkpoints/mask_token.py",
        old='has_markov = rank != 0 or any(name.startswith("markov_head.") for name in names)',
        new="has_markov = False",
        caught_by="checkpoints/test_mask_token_checkpoints.py::"
        "test_what_the_library_does_not_have_is_refused_by_name",
    ),
    Mutant(
        name="rollouts see the text after their anchor",
        source="vllm-project/speculators: models/peagle/attention.py",
        file="training/mask_token.py",
        old="<= owner[..., None]",
        new="<= owner[..., None] + 1",
        caught_by="training/test_mask_rollouts.py::test_a_rollout_is_a_draft_after_its_anchor",
    ),
    Mutant(
        name="masks of a rollout are compared with tokens one too early",
        source="vllm-project/speculators: targets of P-EAGLE",
        file="training/mask_token.py",
        old="labels.gather(anchors + depth + 1)",
        new="labels.gather(anchors + depth)",
        caught_by="training/test_mask_rollouts.py::"
        "test_the_loss_is_the_cross_entropy_to_the_target_at_every_depth",
    ),
]
