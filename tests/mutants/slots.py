"""Mutants of cache slots, positions, attention and features."""

from mutation import Mutant

SLOTS = [
    Mutant(
        name="a token sees the slot behind its own, where rejected tokens lie",
        source="vllm#26498, arXiv 2510.22876 (rows 51, 54)",
        file="target/masks.py",
        old="return keys <= queries",
        new="return keys <= queries + 1",
        caught_by="target/test_slot_attention.py::"
        "test_garbage_in_slots_that_nobody_sees_changes_nothing_bit_for_bit",
    ),
    Mutant(
        name="a sliding window is one slot too wide",
        source="transformers#48280, transformers#46629 (row 32)",
        file="target/masks.py",
        old="keys > queries - sliding_window",
        new="keys >= queries - sliding_window",
        caught_by="target/test_slot_attention.py::"
        "test_attention_is_a_softmax_over_the_visible_slots_of_each_row",
    ),
    Mutant(
        name="all layers of a forward use the mask of the first",
        source="transformers#48280 (row 32)",
        file="target/attention.py",
        old="key = (sliding_window, query.dtype, query.device)",
        new="key = (query.dtype, query.device)",
        caught_by="target/test_slot_attention.py::"
        "test_the_mask_is_made_once_per_kind_of_layer_and_forward",
    ),
    Mutant(
        name="a sliding layer whose model forgets to say so is believed",
        source="transformers#46629, mlx-lm#1423 (rows 32, 36)",
        file="target/self_test.py",
        old="if windows.get(layer) is None:",
        new="if False:",
        caught_by="target/test_bad_models.py::"
        "test_a_model_that_cannot_be_decoded_faithfully_is_refused[forgetful-Target]",
    ),
    Mutant(
        name="the keys of every row are written at row 0's slots",
        source="vllm#14645, Blaizzy/mlx-vlm#1155 (rows 48, 50)",
        file="target/cache.py",
        old="(there + starts).flatten()",
        new="there.flatten()",
        caught_by="target/test_slot_cache.py::TestCacheAgainstLists::runTest",
    ),
    Mutant(
        name="rows are laid out without their spare slot",
        source="vllm#14645 (row 48)",
        file="target/cache.py",
        old="rows[:, None] * length",
        new="rows[:, None] * (length - 1)",
        caught_by="target/test_slot_cache.py::TestCacheAgainstLists::runTest",
    ),
    Mutant(
        name="rows that are kept get the values of other rows beside their keys",
        source="vllm-ascend#16396, sglang#8726 (rows 40, 49)",
        file="target/cache.py",
        old="keep_rows(values, rows)",
        new="keep_rows(values, sorted(rows))",
        caught_by="target/test_slot_cache.py::TestCacheAgainstLists::runTest",
    ),
    Mutant(
        name="a buffer that is used again keeps its old lengths",
        source="sglang#19796, sglang#19897 (row 39)",
        file="loop/token_buffer.py",
        old="self.lengths.copy_(torch.tensor(lengths) - 1)",
        new="self.lengths.copy_(torch.tensor(lengths) - 1) if not self.lengths.any() else None",
        caught_by="loop/test_token_buffer.py::test_a_buffer_holds_what_lists_hold_also_when_rows_leave",
    ),
    Mutant(
        name="a cache that is used again keeps its old keys and values",
        source="sglang#19796, sglang#19897 (row 39)",
        file="target/cache.py",
        old="buffer.zero_()",
        new="pass",
        caught_by="loop/test_loop_edges.py::test_kept_storage_forgets_what_a_broken_draft_model_left_in_it",
    ),
    Mutant(
        name="the drafter's storage is kept without being emptied",
        source="sglang#19796, sglang#19897 (row 39)",
        file="loop/state.py",
        old="self.drafter_state.reset()",
        new="pass",
        caught_by="loop/test_loop_edges.py::"
        "test_kept_storage_forgets_what_a_broken_draft_model_left_in_it",
    ),
    Mutant(
        name="padding is written into real slots behind a short prompt",
        source="vllm#26498 (row 51)",
        file="target/target.py",
        old="slots = torch.where(positions < lengths[:, None], positions, cache.trash)",
        new="slots = positions.expand(tokens.shape)",
        caught_by="target/test_slot_cache.py::"
        "test_slots_that_no_window_has_covered_are_still_zero_after_a_ragged_generation",
    ),
    Mutant(
        name="every chunk of a prompt is read as if it were the first",
        source="mlc-llm#2664 (row 42)",
        file="target/target.py",
        old="positions = offset + torch.arange(tokens.shape[1], device=tokens.device)",
        new="positions = torch.arange(tokens.shape[1], device=tokens.device)",
        caught_by="generator/test_greedy_equality.py::"
        "test_reading_the_prompt_in_chunks_changes_nothing[llama]",
    ),
    Mutant(
        name="every row verifies behind the longest",
        source="Blaizzy/mlx-vlm#1155, arXiv 2510.22876 (rows 50, 54)",
        file="target/target.py",
        old="slots = start[:, None] + torch.arange(",
        new="slots = start.amax().expand(len(tokens), 1) + torch.arange(",
        caught_by="generator/test_greedy_equality.py::"
        "test_greedy_text_of_a_padded_batch_is_that_of_hf[llama-none]",
    ),
    Mutant(
        name="the last draft token lies beyond what verification attends over",
        source="xLLM-AI/xllm#1939, vllm#32591 (rows 85, 86)",
        file="target/cache.py",
        old="attended = min(round_up(num_attended), self.num_slots)",
        new="attended = max(min(num_attended, self.num_slots) // 16, 1) * 16",
        caught_by="generator/test_greedy_equality.py::"
        "test_greedy_text_of_a_padded_batch_is_that_of_hf[llama-none]",
    ),
    Mutant(
        name="slots beyond the last position overrun the position table",
        source="vllm#57941, vllm#16087 (rows 57, 58)",
        file="target/hf_model.py",
        old="window.slots if fits else window.slots.clamp(max=limit - 1)",
        new="window.slots",
        caught_by="request/test_bad_input.py::"
        "test_the_longest_generation_that_fits_the_positions_is_not_refused",
    ),
    Mutant(
        name="a generation may be one token longer than the positions",
        source="vllm#16087, exllamav2#274 (rows 58, 60)",
        file="request/call.py",
        old="total > limit:",
        new="total > limit + 1:",
        caught_by="request/test_bad_input.py::test_a_bad_option_is_refused[too many]",
    ),
    Mutant(
        name="features are the state before each token, not at it",
        source="vllm#15901, mlc-llm#2664 (rows 41, 42)",
        file="loop/step.py",
        old="state.features[:, : width + 1].copy_(features)",
        new="state.features[:, : width + 1].copy_(features.roll(1, dims=1))",
        caught_by="loop/test_context_alignment.py::"
        "test_features_belong_to_the_tokens_and_positions_that_the_context_names[{}-1]",
    ),
    Mutant(
        name="the feature at the border of two chunks of a prompt is lost",
        source="mlx-lm#1109, mlc-llm#2664 (rows 42, 78)",
        file="loop/prefill.py",
        old="num_new=(num_read - 1 - start).clamp(-1, size),",
        new="num_new=(num_read - 1 - start).clamp(-1, size - 1),",
        caught_by="loop/test_context_alignment.py::"
        "test_features_belong_to_the_tokens_and_positions_that_the_context_names[{}-3]",
    ),
    Mutant(
        name="the first proposal is given the feature of another prompt token",
        source="mlc-llm#2664 (row 42)",
        file="loop/prefill.py",
        old="index = num_read - 1 - start",
        new="index = num_read - 2 - start",
        caught_by="loop/test_context_alignment.py::"
        "test_features_belong_to_the_tokens_and_positions_that_the_context_names[{}-100]",
    ),
    Mutant(
        name="the state behind the final norm is taken for the last boundary",
        source="ROCm/ATOM#882 (row 47)",
        file="target/features.py",
        old="wrap_forward(blocks[-1], partial(_keep_output, find_sink, layer))",
        new="wrap_forward(backbone, partial(_keep_output, find_sink, layer))",
        caught_by="target/test_features.py::"
        "test_features_of_prefill_and_verification_are_hfs_hidden_states[llama-8]",
    ),
    Mutant(
        name="features come from one layer below",
        source="vllm#36531, mlx-lm#1485 (row 91)",
        file="target/features.py",
        old="wrap_forward(blocks[layer], partial",
        new="wrap_forward(blocks[max(layer - 1, 0)], partial",
        caught_by="target/test_features.py::"
        "test_features_of_prefill_and_verification_are_hfs_hidden_states[llama-8]",
    ),
    Mutant(
        name="features stand side by side in another order than asked for",
        source="vllm#36531 (row 91)",
        file="target/hf_model.py",
        old="for layer in self.feature_layers]",
        new="for layer in reversed(self.feature_layers)]",
        caught_by="target/test_features.py::"
        "test_features_of_prefill_and_verification_are_hfs_hidden_states[llama-8]",
    ),
    Mutant(
        name="features are caught in the model itself, not in a view of it",
        source="sglang#23392 (row 46)",
        file="target/hf_model.py",
        old="view = private_view(self.model)",
        new="view = self.model if self.feature_layers else private_view(self.model)",
        caught_by="target/test_features.py::"
        "test_hooks_are_gone_after_every_forward_also_after_one_that_failed[llama]",
    ),
    Mutant(
        name="the model itself is switched to specdec's attention",
        source="sglang#23392 (row 46)",
        file="target/hf_model.py",
        old="view = private_view(self.model)",
        new="view = self.model",
        caught_by="target/test_features.py::"
        "test_hooks_are_gone_after_every_forward_also_after_one_that_failed[llama]",
    ),
]
