"""Mutants of the loop: what is committed, how far the host looks, where rows end."""

from mutation import Mutant

LOOP = [
    Mutant(
        name="a row's cache grows by the whole block, not by what was accepted",
        source="Blaizzy/mlx-vlm#1155, paiml/aprender#2014 (rows 38, 50)",
        file="loop/token_buffer.py",
        old="self.lengths += self.num_new",
        new="""\
self.lengths += tokens.shape[1]
        self.lengths.clamp_(max=self.tokens.shape[1] - tokens.shape[1] - 1)""",
        caught_by="generator/test_greedy_equality.py::"
        "test_greedy_text_of_a_padded_batch_is_that_of_hf[llama-perturbed]",
    ),
    Mutant(
        name="a rejection rewinds the cache by one token too many",
        source="lablup/mlxcel#994 (row 37)",
        file="loop/token_buffer.py",
        old="self.lengths += self.num_new",
        new="self.lengths += self.num_new - (self.num_new > 1).long()",
        caught_by="generator/test_greedy_equality.py::"
        "test_greedy_text_of_a_padded_batch_is_that_of_hf[llama-perturbed]",
    ),
    Mutant(
        name="all rows advance as the slowest one",
        source="arXiv 2510.22876 (row 54)",
        file="loop/token_buffer.py",
        old="self.lengths += self.num_new",
        new="self.lengths += self.num_new.amin()",
        caught_by="loop/test_token_buffer.py::test_a_buffer_holds_what_lists_hold_also_when_rows_leave",
    ),
    Mutant(
        name="lengths get a new tensor in every step, which no captured graph would see",
        source="TensorRT-LLM#17110 (row 84)",
        file="loop/token_buffer.py",
        old="self.lengths += self.num_new",
        new="self.lengths = self.lengths + self.num_new",
        caught_by="test_results.py::test_every_tensor_of_a_state_stays_where_it_is_from_step_to_step_and_from_call_to_call[none-BlockSampler]",
    ),
    Mutant(
        name="every step waits for the device to tell a length",
        source="xLLM-AI/xllm#1939, TensorRT-LLM#17110 (rows 84, 85)",
        file="loop/token_buffer.py",
        old="self.note_longest(self.longest + width)",
        new="self.note_longest(int(self.lengths.max()) + 1)",
        caught_by="loop/test_no_host_sync.py::"
        "test_a_step_runs_without_waiting_and_always_in_the_same_shapes[model-sampled]",
    ),
    Mutant(
        name="the host's bound of the longest row grows by one token per step",
        source="Blaizzy/mlx-vlm#1155 (row 50)",
        file="loop/token_buffer.py",
        old="self.note_longest(self.longest + width)",
        new="self.note_longest(self.longest + 1)",
        caught_by="loop/test_no_host_sync.py::test_the_bound_of_the_host_holds_and_stops_growing_at_the_room_of_the_call",
    ),
    Mutant(
        name="the bound forgets the steps that the host has not read",
        source="vllm#48245, vllm#49620 (row 56)",
        file="generator.py",
        old="longest = collector.longest + width * len(unread)",
        new="longest = collector.longest",
        caught_by="loop/test_loop_edges.py::"
        "test_steps_attend_over_all_that_was_committed_though_the_host_has_not_read_it[1]",
    ),
    Mutant(
        name="a step without draft tokens reads nothing",
        source="generation.num_draft_tokens alternating 4, 0: 2.7 of 4 accepted",
        file="loop/step.py",
        old="if most > 0:",
        new="if num_draft_tokens > 0:",
        caught_by="drafters/test_draft_lengths.py::"
        "test_steps_without_a_draft_that_are_replayed_read_what_was_committed[itself]",
    ),
    Mutant(
        name="a context starts behind its new tokens, not in front of them",
        source="mlc-llm#2664, vllm#15901 (rows 41, 42)",
        file="loop/token_buffer.py",
        old="self.start.copy_(self.lengths)",
        new="self.start.copy_(self.lengths + self.num_new)",
        caught_by="loop/test_context_alignment.py::"
        "test_features_belong_to_the_tokens_and_positions_that_the_context_names[{}-100]",
    ),
    Mutant(
        name="a context keeps the anchor of the step before",
        source="vllm#4212, vllm#46899 (rows 30, 55)",
        file="loop/token_buffer.py",
        old="torch.cat([self.anchor[:, None], tokens], dim=1, out=self.recent[:, : width + 1])",
        new="self.recent[:, 1 : width + 1] = tokens",
        caught_by="loop/test_context_alignment.py::"
        "test_features_belong_to_the_tokens_and_positions_that_the_context_names[{}-100]",
    ),
    Mutant(
        name="the length limit does not cut a block",
        source="SafeAILab/EAGLE, feifeibear/LLMSpeculativeSampling (rows 25, 67)",
        file="loop/token_buffer.py",
        old="num_kept = torch.minimum(num_accepted + 1, self.remaining)",
        new="num_kept = (num_accepted + 1) * (self.remaining > 0)",
        caught_by="generator/test_generate_contract.py::test_the_length_limit_is_honoured_inside_a_block[7]",
    ),
    Mutant(
        name="tokens behind an accepted end of sequence are kept",
        source="transformers#47912, LostRuins/koboldcpp#1276 (rows 61, 62)",
        file="loop/token_buffer.py",
        old="torch.minimum(num_kept, first_end + 1, out=self.num_new)",
        new="self.num_new.copy_(num_kept)",
        caught_by="generator/test_generate_contract.py::"
        "test_end_of_sequence_is_honoured_at_every_offset_of_an_accepted_block[1]",
    ),
    Mutant(
        name="the end of sequence itself is cut off",
        source="transformers#47931 (row 61)",
        file="loop/token_buffer.py",
        old="torch.minimum(num_kept, first_end + 1, out=self.num_new)",
        new="torch.minimum(num_kept, first_end.clamp(min=1), out=self.num_new)",
        caught_by="generator/test_generate_contract.py::"
        "test_end_of_sequence_is_honoured_at_every_offset_of_an_accepted_block[1]",
    ),
    Mutant(
        name="only the first of several end-of-sequence ids ends a row",
        source="transformers#48981 (row 61)",
        file="loop/token_buffer.py",
        old="for token in eos if",
        new="for token in eos[:1] if",
        caught_by="generator/test_generate_contract.py::test_several_ids_may_end_a_sequence[none]",
    ),
    Mutant(
        name="an end-of-sequence id of 0 ends nothing",
        source="review of this repository",
        file="loop/token_buffer.py",
        old="if 0 <= token <",
        new="if 1 <= token <",
        caught_by="loop/test_token_buffer.py::test_a_buffer_holds_what_lists_hold_also_when_rows_leave",
    ),
    Mutant(
        name="an end of sequence in the draft ends its row although it is rejected",
        source="openvino.genai#3293 (row 63)",
        file="loop/step.py",
        old="state.buffer.commit(*harmless_verdict(verdict, state.vocab_size))",
        new="""\
state.buffer.commit(
        torch.cat([draft.tokens, verdict.tokens[:, -1:]], dim=1),
        harmless_verdict(verdict, state.vocab_size)[1],
    )""",
        caught_by="generator/test_generate_contract.py::"
        "test_a_rejected_end_of_sequence_in_the_draft_does_not_end_the_row",
    ),
    Mutant(
        name="an end of sequence behind the length limit is reported as the reason",
        source="openvino.genai#3293, vllm#38711 (rows 59, 63)",
        file="loop/token_buffer.py",
        old="is_eos = first_end < num_kept",
        new="is_eos = first_end < tokens.shape[1]",
        caught_by="generator/test_generate_contract.py::"
        "test_an_end_of_sequence_behind_the_length_limit_is_not_why_a_row_ends[7]",
    ),
    Mutant(
        name="a row that has ended goes on committing tokens",
        source="LostRuins/koboldcpp#1276, mlx-node/mlx-node#121 (rows 62, 66)",
        file="loop/token_buffer.py",
        old="self.remaining.masked_fill_(is_eos, 0)",
        new="pass",
        caught_by="generator/test_generate_contract.py::test_a_row_that_has_ended_commits_nothing_more[eos_token_id-False]",
    ),
    Mutant(
        name="a row cut by a stopping criterion goes on on the device",
        source="onnxruntime-genai#2528 (row 65)",
        file="loop/collector.py",
        old="self._generation.end_rows([row])",
        new="pass",
        caught_by="generator/test_generate_contract.py::"
        "test_a_row_that_has_ended_commits_nothing_more[stopping_criteria-False]",
    ),
    Mutant(
        name="stopping criteria are asked at the end of a block only",
        source="onnxruntime-genai#2528 (row 65)",
        file="loop/collector.py",
        old="for count in range(1, len(tokens) + 1):",
        new="for count in [len(tokens)]:",
        caught_by="generator/test_generate_contract.py::"
        "test_a_stopping_criterion_ends_its_row_at_the_token_that_meets_it[generator0-2]",
    ),
    Mutant(
        name="a row that moves leaves its features behind",
        source="vllm#14645, sglang#8726 (rows 40, 48)",
        file="loop/state.py",
        old="keep_rows(self.features, rows)",
        new="self.features[: len(rows)]",
        caught_by="loop/test_dropped_rows.py::"
        "test_a_row_of_a_batch_that_shrinks_is_the_row_alone[eagle-6-block]",
    ),
    Mutant(
        name="rows leave beside logits processors, which are told the rows of the batch",
        source="vllm#14645, vllm-ascend#16396 (rows 48, 49)",
        file="loop/generation.py",
        old="if self.request.options.processors or self.runner.captures:",
        new="if self.runner.captures:",
        caught_by="loop/test_dropped_rows.py::test_beside_logits_processors_no_row_leaves[none]",
    ),
]
