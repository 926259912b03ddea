"""Mutants of the loop: what is committed, how far the host looks, where rows end."""

from mutation import Mutant

LOOP = [
    Mutant(
        name="a row's cache grows by the whole block, not by what was accepted",
        source="Blaizzy/mlx-vlm#1155, paiml/aprender#2014 (rows 38, 50)",
        file="kernels/host.py",
        old="length, num_new, length + num_new",
        new="""\
length, num_new, min(
            length + len(tokens), self.text.shape[1] - len(tokens) - 1
        )""",
        caught_by="test_greedy_equality.py::"
        "test_greedy_text_of_a_padded_batch_is_that_of_hf[llama-perturbed]",
    ),
    Mutant(
        name="a rejection rewinds the cache by one token too many",
        source="lablup/mlxcel#994 (row 37)",
        file="kernels/host.py",
        old="length, num_new, length + num_new",
        new="length, num_new, length + num_new - (num_new > 1)",
        caught_by="test_greedy_equality.py::"
        "test_greedy_text_of_a_padded_batch_is_that_of_hf[llama-perturbed]",
    ),
    Mutant(
        name="all rows advance as the slowest one",
        source="arXiv 2510.22876 (row 54)",
        file="kernels/books.py",
        old="self.lengths += self.num_new",
        new="self.lengths += self.num_new.amin()",
        caught_by="test_books.py::test_the_host_keeps_the_books_that_operations_keep",
    ),
    Mutant(
        name="lengths get a new tensor in every step, which no captured graph would see",
        source="TensorRT-LLM#17110 (row 84)",
        file="kernels/books.py",
        old="self.lengths += self.num_new",
        new="self.lengths = self.lengths + self.num_new",
        caught_by="test_results.py::test_every_tensor_of_a_state_stays_where_it_is_from_step_to_step[none]",
    ),
    Mutant(
        name="every step waits for the device to tell a length",
        source="xLLM-AI/xllm#1939, TensorRT-LLM#17110 (rows 84, 85)",
        file="state.py",
        old="self.bound(self.longest + self.width)",
        new="self.bound(int(self.lengths.max()))",
        caught_by="test_no_host_sync.py::"
        "test_a_step_runs_without_waiting_and_always_in_the_same_shapes[model-sampled]",
    ),
    Mutant(
        name="the host's bound of the longest row grows by one token per step",
        source="Blaizzy/mlx-vlm#1155 (row 50)",
        file="state.py",
        old="self.bound(self.longest + self.width)",
        new="self.bound(self.longest + 1)",
        caught_by="test_no_host_sync.py::"
        "test_the_bound_of_the_host_stops_growing_at_the_room_of_the_state",
    ),
    Mutant(
        name="the bound forgets the steps that the host has not read",
        source="vllm#48245, vllm#49620 (row 56)",
        file="generator.py",
        old="state.bound(ledger.longest + width * len(unread))",
        new="state.bound(ledger.longest)",
        caught_by="test_loop_edges.py::"
        "test_a_host_that_reads_one_step_late_reads_the_same_text[{}-target]",
    ),
    Mutant(
        name="a context starts behind its new tokens, not in front of them",
        source="mlc-llm#2664, vllm#15901 (rows 41, 42)",
        file="kernels/host.py",
        old="length, num_new, length + num_new",
        new="length + num_new, num_new, length + num_new",
        caught_by="test_context_alignment.py::"
        "test_features_belong_to_the_tokens_and_positions_that_the_context_names[{}-100]",
    ),
    Mutant(
        name="a context keeps the anchor of the step before",
        source="vllm#4212, vllm#46899 (rows 30, 55)",
        file="kernels/host.py",
        old="self._recent[window] = self._text[place]",
        new="pass",
        caught_by="test_context_alignment.py::"
        "test_features_belong_to_the_tokens_and_positions_that_the_context_names[{}-100]",
    ),
    Mutant(
        name="the length limit does not cut a block",
        source="SafeAILab/EAGLE, feifeibear/LLMSpeculativeSampling (rows 25, 67)",
        file="kernels/host.py",
        old="num_kept = min(num_accepted + 1, self._remaining[row])",
        new="num_kept = num_accepted + 1",
        caught_by="test_generate_contract.py::test_the_length_limit_is_honoured_inside_a_block[3]",
    ),
    Mutant(
        name="tokens behind an accepted end of sequence are kept",
        source="transformers#47912, LostRuins/koboldcpp#1276 (rows 61, 62)",
        file="kernels/host.py",
        old="num_new, length = min(num_kept, first_end + 1),",
        new="num_new, length = num_kept,",
        caught_by="test_generate_contract.py::"
        "test_end_of_sequence_is_honoured_at_every_offset_of_an_accepted_block[1]",
    ),
    Mutant(
        name="the end of sequence itself is cut off",
        source="transformers#47931 (row 61)",
        file="kernels/host.py",
        old="num_new, length = min(num_kept, first_end + 1),",
        new="num_new, length = min(num_kept, max(first_end, 1)),",
        caught_by="test_generate_contract.py::"
        "test_end_of_sequence_is_honoured_at_every_offset_of_an_accepted_block[1]",
    ),
    Mutant(
        name="only the first of several end-of-sequence ids ends a row",
        source="transformers#48981 (row 61)",
        file="kernels/books.py",
        old="for token in ends if",
        new="for token in ends[:1] if",
        caught_by="test_generate_contract.py::test_several_ids_may_end_a_sequence[none]",
    ),
    Mutant(
        name="an end of sequence in the draft ends its row although it is rejected",
        source="openvino.genai#3293 (row 63)",
        file="state.py",
        old="self.books.commit(verdict.tokens,",
        new="self.books.commit(torch.cat([draft.tokens, verdict.tokens[:, -1:]], dim=1),",
        caught_by="test_generate_contract.py::"
        "test_a_rejected_end_of_sequence_in_the_draft_does_not_end_the_row",
    ),
    Mutant(
        name="an end of sequence behind the length limit is reported as the reason",
        source="openvino.genai#3293, vllm#38711 (rows 59, 63)",
        file="kernels/host.py",
        old="is_eos = first_end < num_kept",
        new="is_eos = any(token in self._end_ids for token in tokens)",
        caught_by="test_generate_contract.py::"
        "test_an_end_of_sequence_behind_the_length_limit_is_not_why_a_row_ends[3]",
    ),
    Mutant(
        name="a row that has ended goes on committing tokens",
        source="LostRuins/koboldcpp#1276, mlx-node/mlx-node#121 (rows 62, 66)",
        file="kernels/host.py",
        old="0 if is_eos else self._remaining[row] - num_new",
        new="self._remaining[row] - num_new",
        caught_by="test_generate_contract.py::test_a_row_that_has_ended_commits_nothing_more[eos_token_id-False]",
    ),
    Mutant(
        name="a row cut by a stopping criterion goes on on the device",
        source="onnxruntime-genai#2528 (row 65)",
        file="ledger.py",
        old="self._state.end_rows([row])",
        new="pass",
        caught_by="test_generate_contract.py::"
        "test_a_row_that_has_ended_commits_nothing_more[stopping_criteria-False]",
    ),
    Mutant(
        name="stopping criteria are asked at the end of a block only",
        source="onnxruntime-genai#2528 (row 65)",
        file="ledger.py",
        old="for count in range(1, len(tokens) + 1):",
        new="for count in [len(tokens)]:",
        caught_by="test_generate_contract.py::"
        "test_a_stopping_criterion_ends_its_row_at_the_token_that_meets_it[generator0-2]",
    ),
    Mutant(
        name="a row that a criterion has cut is thought shorter than it is on the device",
        source="onnxruntime-genai#2528, vllm#48245 (rows 56, 65)",
        file="ledger.py",
        old="return max(self._lengths[row] for row in self._state.rows)",
        new="return max(map(sum, zip(self._state.prompts.lengths, map(len, self.new_tokens))))",
        caught_by="test_loop_edges.py::"
        "test_a_row_cut_inside_an_accepted_block_may_be_the_longest_on_the_device",
    ),
    Mutant(
        name="a row that moves leaves its features behind",
        source="vllm#14645, sglang#8726 (rows 40, 48)",
        file="state.py",
        old="keep_rows(self.features, rows)",
        new="self.features[: len(rows)]",
        caught_by="test_dropped_rows.py::"
        "test_a_row_of_a_batch_that_shrinks_is_the_row_alone[eagle-6-block]",
    ),
    Mutant(
        name="rows leave beside logits processors, which are told the rows of the batch",
        source="vllm#14645, vllm-ascend#16396 (rows 48, 49)",
        file="state.py",
        old="if self.options.processors:",
        new="if False:",
        caught_by="test_dropped_rows.py::test_beside_logits_processors_no_row_leaves[none]",
    ),
]
