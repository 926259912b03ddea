"""Mutants of cache slots, positions, attention and features."""

from mutation import Mutant

SLOTS = [
    Mutant(
        name="a token sees the slot behind its own, where rejected tokens lie",
        source="vllm#26498, arXiv 2510.22876 (rows 51, 54)",
        file="attention.py",
        old="visible = slots <= queries",
        new="visible = slots <= queries + 1",
        caught_by="test_slot_attention.py::"
        "test_garbage_in_slots_that_nobody_sees_changes_nothing_bit_for_bit",
    ),
    Mutant(
        name="a sliding window is one slot too wide",
        source="transformers#48280, transformers#46629 (row 32)",
        file="attention.py",
        old="slots > queries - sliding_window",
        new="slots >= queries - sliding_window",
        caught_by="test_slot_attention.py::"
        "test_attention_is_a_softmax_over_the_visible_slots_of_each_row",
    ),
    Mutant(
        name="all layers of a forward use the mask of the first",
        source="transformers#48280 (row 32)",
        file="attention.py",
        old="key = (sliding_window, dtype, device)",
        new="key = (dtype, device)",
        caught_by="test_slot_attention.py::"
        "test_the_mask_is_made_once_per_kind_of_layer_and_forward",
    ),
    Mutant(
        name="a sliding layer whose model forgets to say so is believed",
        source="transformers#46629, mlx-lm#1423 (rows 32, 36)",
        file="slot_model.py",
        old="if self._audit.get(layer) is None:",
        new="if False:",
        caught_by="test_bad_models.py::"
        "test_a_model_that_cannot_be_decoded_faithfully_is_refused[forgetful-Target]",
    ),
    Mutant(
        name="the keys of every row are written at row 0's slots",
        source="vllm#14645, Blaizzy/mlx-vlm#1155 (rows 48, 50)",
        file="cache.py",
        old="slots + self._row_offsets).flatten()",
        new="slots).flatten()",
        caught_by="test_slot_cache.py::TestCacheAgainstLists::runTest",
    ),
    Mutant(
        name="rows are laid out without their spare slot",
        source="vllm#14645 (row 48)",
        file="cache.py",
        old="torch.arange(batch_size, device=device)[:, None] * (num_slots + 1)",
        new="torch.arange(batch_size, device=device)[:, None] * num_slots",
        caught_by="test_slot_cache.py::TestCacheAgainstLists::runTest",
    ),
    Mutant(
        name="rows that are kept get the values of other rows beside their keys",
        source="vllm-ascend#16396, sglang#8726 (rows 40, 49)",
        file="cache.py",
        old="keep_rows(values, rows)",
        new="keep_rows(values, sorted(rows))",
        caught_by="test_slot_cache.py::TestCacheAgainstLists::runTest",
    ),
    Mutant(
        name="a cache that is used again keeps its old lengths",
        source="sglang#19796, sglang#19897 (row 39)",
        file="cache.py",
        old="self.lengths.zero_()",
        new="pass",
        caught_by="test_results.py::"
        "test_kept_storage_serves_calls_of_equal_size_and_changes_no_text[none-lengths1]",
    ),
    Mutant(
        name="a cache that is used again keeps its old keys and values",
        source="sglang#19796, sglang#19897 (row 39)",
        file="cache.py",
        old="buffer.zero_()",
        new="pass",
        caught_by="test_slot_cache.py::TestCacheAgainstLists::runTest",
    ),
    Mutant(
        name="the drafter's storage is kept without being emptied",
        source="sglang#19796, sglang#19897 (row 39)",
        file="generator.py",
        old="drafter_state.reset()",
        new="pass",
        caught_by="test_loop_edges.py::"
        "test_kept_storage_forgets_what_a_broken_draft_model_left_in_it",
    ),
    Mutant(
        name="padding is written into real slots behind a short prompt",
        source="vllm#26498 (row 51)",
        file="target.py",
        old="slots = torch.where(positions < lengths[:, None], positions, cache.trash)",
        new="slots = positions.expand(tokens.shape)",
        caught_by="test_slot_cache.py::"
        "test_slots_that_no_window_has_covered_are_still_zero_after_a_ragged_generation",
    ),
    Mutant(
        name="every chunk of a prompt is read as if it were the first",
        source="mlc-llm#2664 (row 42)",
        file="target.py",
        old="positions = offset + torch.arange(",
        new="positions = torch.arange(",
        caught_by="test_greedy_equality.py::"
        "test_reading_the_prompt_in_chunks_changes_nothing[llama]",
    ),
    Mutant(
        name="every row verifies behind the longest",
        source="Blaizzy/mlx-vlm#1155, arXiv 2510.22876 (rows 50, 54)",
        file="target.py",
        old="slots = cache.lengths[:, None] + cache.offsets",
        new="slots = cache.lengths.amax().expand(len(tokens), 1) + cache.offsets",
        caught_by="test_greedy_equality.py::"
        "test_greedy_text_of_a_padded_batch_is_that_of_hf[llama-none]",
    ),
    Mutant(
        name="the last draft token lies beyond what verification attends over",
        source="xLLM-AI/xllm#1939, vllm#32591 (rows 85, 86)",
        file="target.py",
        old="reach=longest + draft.tokens.shape[1]",
        new="reach=longest + draft.tokens.shape[1] - 1",
        caught_by="test_greedy_equality.py::"
        "test_greedy_text_of_a_padded_batch_is_that_of_hf[llama-none]",
    ),
    Mutant(
        name="slots beyond the last position overrun the position table",
        source="vllm#57941, vllm#16087 (rows 57, 58)",
        file="slot_model.py",
        old="slots if fits else slots.clamp(max=limit - 1)",
        new="slots",
        caught_by="test_bad_input.py::"
        "test_the_longest_generation_that_fits_the_positions_is_not_refused",
    ),
    Mutant(
        name="a generation may be one token longer than the positions",
        source="vllm#16087, exllamav2#274 (rows 58, 60)",
        file="request.py",
        old="total > limit:",
        new="total > limit + 1:",
        caught_by="test_bad_input.py::test_a_bad_option_is_refused[too many]",
    ),
    Mutant(
        name="features are the state before each token, not at it",
        source="vllm#15901, mlc-llm#2664 (rows 41, 42)",
        file="state.py",
        old="self.features.copy_(features)",
        new="self.features.copy_(features.roll(1, dims=1))",
        caught_by="test_context_alignment.py::"
        "test_features_belong_to_the_tokens_and_positions_that_the_context_names[{}-1]",
    ),
    Mutant(
        name="the feature at the border of two chunks of a prompt is lost",
        source="mlx-lm#1109, mlc-llm#2664 (rows 42, 78)",
        file="prefill.py",
        old="num_new=(num_read - 1 - offset).clamp(-1, end - offset),",
        new="num_new=(num_read - 1 - offset).clamp(-1, end - offset - 1),",
        caught_by="test_context_alignment.py::"
        "test_features_belong_to_the_tokens_and_positions_that_the_context_names[{}-3]",
    ),
    Mutant(
        name="the first proposal is given the feature of another prompt token",
        source="mlc-llm#2664 (row 42)",
        file="prefill.py",
        old="index = num_read - 1 - offset",
        new="index = num_read - 2 - offset",
        caught_by="test_context_alignment.py::"
        "test_features_belong_to_the_tokens_and_positions_that_the_context_names[{}-100]",
    ),
    Mutant(
        name="the state behind the final norm is taken for the last boundary",
        source="ROCm/ATOM#882 (row 47)",
        file="features.py",
        old="return self._blocks[-1].register_forward_hook(after)",
        new="return self._backbone.register_forward_hook(after_backbone)",
        caught_by="test_features.py::"
        "test_features_of_prefill_and_verification_are_hfs_hidden_states[llama-8]",
    ),
    Mutant(
        name="features come from one layer below",
        source="vllm#36531, mlx-lm#1485 (row 91)",
        file="features.py",
        old="return self._blocks[layer].register_forward_pre_hook",
        new="return self._blocks[max(layer - 1, 0)].register_forward_pre_hook",
        caught_by="test_features.py::"
        "test_features_of_prefill_and_verification_are_hfs_hidden_states[llama-8]",
    ),
    Mutant(
        name="features stand side by side in another order than asked for",
        source="vllm#36531 (row 91)",
        file="features.py",
        old="[self.caught[layer] for layer in self.layers]",
        new="[self.caught[layer] for layer in reversed(self.layers)]",
        caught_by="test_features.py::"
        "test_features_of_prefill_and_verification_are_hfs_hidden_states[llama-8]",
    ),
    Mutant(
        name="hooks that catch features stay on the model",
        source="sglang#23392 (row 46)",
        file="features.py",
        old="handle.remove()",
        new="pass",
        caught_by="test_features.py::"
        "test_hooks_are_gone_after_every_forward_also_after_one_that_failed[llama]",
    ),
    Mutant(
        name="an exception inside a forward leaves the model switched",
        source="sglang#23392 (row 46)",
        file="slot_model.py",
        old="fields.update(zip(names, values, strict=True))",
        new="""\
if __import__("sys").exc_info()[0] is None:
                    fields.update(zip(names, values, strict=True))""",
        caught_by="test_model_unchanged.py::"
        "test_an_exception_inside_a_forward_changes_nothing[llama-1-target]",
    ),
]
