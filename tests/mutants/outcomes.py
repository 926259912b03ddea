"""Mutants of what comes out of a step: counts, streams, faults; and what processors see."""

from mutation import Mutant

OUTCOMES = [
    Mutant(
        name="steps of a row that has ended are counted",
        source="vllm#56101, sglang#39826 (row 64)",
        file="loop/collector.py",
        old="                continue\n",
        new="""\
                self.steps[number].append(RowStep(row.draft_tokens, row.num_accepted, []))
                continue
""",
        caught_by="loop/test_loop_edges.py::"
        "test_a_host_that_reads_one_step_late_reads_the_same_text[{}-model]",
    ),
    Mutant(
        name="tokens behind a row's end are counted as emitted",
        source="vllm#56101, sglang#39826 (row 64)",
        file="results.py",
        old="sum(len(s.new_tokens) for s in row) for row in steps",
        new="sum(s.num_accepted + 1 for s in row) for row in steps",
        caught_by="test_results.py::"
        "test_the_statistics_agree_with_a_recount_of_the_trace[perturbed]",
    ),
    Mutant(
        name="placeholders behind a short draft are counted as drafted",
        source="vllm#46899, vllm#31944 (row 55)",
        file="loop/outcome.py",
        old="draft_tokens=drafted[:num_drafted],",
        new="draft_tokens=drafted,",
        caught_by="request/test_bad_input.py::"
        "test_a_draft_model_with_fewer_positions_drafts_as_far_as_it_can[llama]",
    ),
    Mutant(
        name="a placeholder of the library fills rows of the result",
        source="vllm#46899, vllm#31944 (row 55)",
        file="loop/collector.py",
        old="padded = [new + [pad]",
        new="padded = [new + [-1]",
        caught_by="test_results.py::test_the_fields_of_a_result_describe_its_sequences[none]",
    ),
    Mutant(
        name="the streamer is given columns again",
        source="sglang#31598, exo#1691 (row 92)",
        file="loop/collector.py",
        old="self._num_streamed = ready",
        new="self._num_streamed = max(0, ready - 1)",
        caught_by="generator/test_generate_contract.py::"
        "test_a_streamer_is_given_what_hf_would_put[1-perturbed]",
    ),
    Mutant(
        name="the streamer gets padding for rows that are only slow",
        source="exo#1691, vllm#14645 (rows 48, 92)",
        file="loop/collector.py",
        old="(n for n, open_ in zip(counts, is_open, strict=True) if open_), default=max(counts)",
        new="[max(counts)]",
        caught_by="generator/test_generate_contract.py::"
        "test_a_streamer_is_given_what_hf_would_put[3-perturbed]",
    ),
    Mutant(
        name="half of a character is shown before its other bytes have come",
        source="mlx-vlm#1778, sglang#31598 (row 92)",
        file="results.py",
        old='if text.endswith("\\ufffd") and end < len(tokens):',
        new="if False:",
        caught_by="evaluation/test_display.py::"
        "test_without_its_marks_it_is_the_text_character_for_character[file-hanzi-0]",
    ),
    Mutant(
        name="NaN logits of a greedy batch are emitted",
        source="sglang#27883 (row 76)",
        file="kernels/__init__.py",
        old="faults = find_target_faults(largest_logits, num_accepted)",
        new="faults = 0 * num_accepted",
        caught_by="target/test_bad_models.py::"
        "test_logits_that_are_not_finite_stop_the_generation[none-greedy-nan]",
    ),
    Mutant(
        name="infinite logits of a sampled batch are emitted",
        source="sglang#27883 (row 76)",
        file="kernels/verify/reference.py",
        old="sums = (largest_logits - largest_logits).cumsum(dim=1)",
        new="sums = largest_logits.isnan().double().cumsum(dim=1)",
        caught_by="request/test_bad_laws.py::test_logits_that_are_no_law_stop_the_generation_"
        "whatever_the_sampler[sampled-inf-RejectionSampler]",
    ),
    Mutant(
        name="NaN behind a rejected token of a greedy batch stops it",
        source="sglang#27883 (row 76)",
        file="kernels/__init__.py",
        old="faults = find_target_faults(largest_logits, num_accepted)",
        new="faults = find_target_faults(largest_logits, 0 * num_accepted + draft.tokens.shape[1])",
        caught_by="target/test_bad_models.py::test_logits_behind_a_rejected_token_may_be_anything",
    ),
    Mutant(
        name="NaN behind a rejected token of a sampled batch stops it",
        source="sglang#27883 (row 76)",
        file="kernels/verify/reference.py",
        old="sums.gather(1, num_accepted[:, None])[:, 0]",
        new="sums[:, -1]",
        caught_by="target/test_bad_models.py::"
        "test_logits_behind_a_rejected_token_may_be_anything_for_every_sampler[nan-RejectionSampler]",
    ),
    Mutant(
        name="draft probabilities that are negative pass where they sum to 1",
        source="a residual of target minus draft that exceeds the target",
        file="kernels/verify/reference.py",
        old="is_off = is_off | (draft.probs.amin(dim=-1) < 0)",
        new="is_off = is_off",
        caught_by="kernels/test_kernels_faults.py::test_draft_probabilities_that_cannot_be_right_"
        "are_found_where_they_are_valid[None-a negative entry]",
    ),
    Mutant(
        name="a lossy rule that does not use draft probabilities does not check them",
        source="one token proposed for ever by a drafter of NaN",
        file="samplers/typical.py",
        old="faults = find_faults(draft, ",
        new="faults = find_faults(Draft(draft.tokens), ",
        caught_by="request/test_bad_laws.py::test_a_wrong_draft_law_stops_the_generation_before_its_step_is_"
        "emitted[TypicalSampler-a law of NaN]",
    ),
    Mutant(
        name="what is wrong in a row that has ended stops the others",
        source="sglang#23392, vllm#41841 (rows 46, 83)",
        file="loop/collector.py",
        old="if row.faults and self.finish_reasons[number] is None:",
        new="if row.faults:",
        caught_by="target/test_bad_models.py::test_logits_of_a_row_that_has_ended_may_be_anything",
    ),
    Mutant(
        name="logits processors are left out where there are drafts",
        source="vllm#18902, TensorRT-LLM#17701 (row 68)",
        file="loop/generation.py",
        old="return self._process if self.request.options.processors else None",
        new="return None",
        caught_by="generator/test_generate_contract.py::"
        "test_a_generation_config_means_what_it_means_to_hf[lookup]",
    ),
    Mutant(
        name="only the first of the committed tokens enters the penalties' history",
        source="sglang#33643 (row 69)",
        file="loop/processors.py",
        old="prompt + tokens[start:end]",
        new="prompt + tokens[start:end][:1] * (end - start)",
        caught_by="generator/test_generate_contract.py::test_logits_processors_see_every_prefix_that_"
        "plain_decoding_shows_them[perturbed]",
    ),
    Mutant(
        name="processors do not see the draft tokens before a place",
        source="TensorRT-LLM#7878, sglang#33643 (rows 69, 75)",
        file="loop/processors.py",
        old="draft_tokens[row].clamp(min=0)",
        new="pad",
        caught_by="generator/test_generate_contract.py::test_logits_processors_see_every_prefix_that_"
        "plain_decoding_shows_them[perturbed]",
    ),
    Mutant(
        name="processors reach the first place of a window only",
        source="TensorRT-LLM#7878 (row 75)",
        file="loop/processors.py",
        old="if starts[row] <= length < starts[row] + width]",
        new="if starts[row] == length]",
        caught_by="generator/test_generate_contract.py::test_logits_processors_see_every_prefix_that_"
        "plain_decoding_shows_them[perturbed]",
    ),
    Mutant(
        name="processors leave out the bonus token's row",
        source="vllm#44297, vllm#53777 (row 73)",
        file="loop/processors.py",
        old="if starts[row] <= length < starts[row] + width]",
        new="if starts[row] <= length < starts[row] + max(width - 1, 1)]",
        caught_by="test_sampler_laws.py::test_logits_processors_that_read_the_text_"
        "belong_to_the_target[bad words-soft-RejectionSampler]",
    ),
    Mutant(
        name="processors of ragged rows see the shorter rows padded to the longest",
        source="sglang#33643, vllm#44297 (rows 69, 73)",
        file="loop/processors.py",
        old="starts = [len(prefix) for prefix in prefixes]",
        new="starts = [max(map(len, prefixes))] * len(prefixes)",
        caught_by="generator/test_generate_contract.py::test_logits_processors_see_every_prefix_that_"
        "plain_decoding_shows_them[perturbed]",
    ),
    Mutant(
        name="processors number the rows that take part, not those of the batch",
        source="vllm#14645 (row 48)",
        file="loop/processors.py",
        old="out = processor(ids[:, :length].clone(), scores)",
        new="out = scores.index_copy("
        "0, row_index, processor(ids[row_index, :length], scores[row_index]))",
        caught_by="generator/test_generate_contract.py::"
        "test_through_the_hook_logits_processors_are_told_the_rows_of_the_batch[perturbed]",
    ),
    Mutant(
        name="rows see the padding of their batch",
        source="review of this repository",
        file="request/call.py",
        old="groups = self.prompts.alone() if is_alone else [self.prompts.padded]",
        new="groups = [self.prompts.padded]",
        caught_by="request/test_rows_alone.py::"
        "test_a_row_of_a_batch_gets_the_text_that_hf_gives_it_alone[own-pad-left]",
    ),
    Mutant(
        name="what is counted from the prompt is counted from the padded one",
        source="sglang#33643 (row 69)",
        file="request/options.py",
        old="config, missing = copy.copy(config), width - ids.shape[1]",
        new="config, missing = copy.copy(config), 0",
        caught_by="request/test_rows_alone.py::"
        "test_a_row_of_a_batch_gets_the_text_that_hf_gives_it_alone[forced end-pad-left]",
    ),
    Mutant(
        name="a grammar goes on from a draft that was rejected",
        source="osaurus-ai/vmlx-swift#357, vllm#44297 (rows 70, 73)",
        file="request/grammar.py",
        old="if common < len(accepted):",
        new="if not common and accepted:",
        caught_by="request/test_grammar.py::"
        "test_a_draft_that_was_rejected_is_taken_back_from_where_the_texts_differ",
    ),
    Mutant(
        name="a processor that nobody vouches for runs",
        source="osaurus-ai/vmlx-swift#357, #361 (row 70)",
        file="request/processors.py",
        old='if not (getattr(judged, "is_stateless", None) is True or _is_plain(judged)):',
        new="if False:",
        caught_by="request/test_processors.py::"
        "test_a_processor_that_may_keep_state_is_refused_by_name_and_not_called[iterator]",
    ),
    Mutant(
        name="a padding id after the prompt is padding",
        source="review of this repository",
        file="request/call.py",
        old="attention_mask = (input_ids != padding_id).cumsum(dim=1).clamp(max=1)",
        new="attention_mask = input_ids != padding_id",
        caught_by="generator/test_generate_contract.py::"
        "test_a_padding_id_after_a_prompts_first_token_is_a_token[-1]",
    ),
    Mutant(
        name="warpers that the user put in another order are applied in HF's",
        source="sglang test_eagle_sampling_filters.py (row 13)",
        file="request/options.py",
        old="if ranks != sorted(set(ranks)):",
        new="if False:",
        caught_by="loop/test_loop_edges.py::"
        "test_warpers_of_the_users_own_keep_their_order[top_p-temperature-top_k-min_p]",
    ),
]
