"""Mutants of captured steps: filled buckets, what a graph has taken over, draft lengths."""

from mutation import Mutant

_STEPS = "graphs/test_captured_steps.py::"

GRAPHS = [
    Mutant(
        name="rows that fill a bucket commit tokens",
        source="vllm#43682, vllm#41841 (rows 82, 83)",
        file="loop/state.py",
        old="self.buffer.remaining[num_real:] = 0",
        new="pass",
        caught_by=_STEPS + "test_rows_that_fill_a_bucket_are_never_read_and_never_emitted[3]",
    ),
    Mutant(
        name="a bucket is filled with rows of the batch instead of inert ones",
        source="vllm#41841 (row 83)",
        file="graphs/capture.py",
        old="return torch.cat([tensor, row.expand(missing, *row.shape[1:])])",
        new="return torch.cat([tensor, tensor[-1:].expand(missing, *row.shape[1:])])",
        caught_by="graphs/test_capture.py::"
        "test_rows_that_fill_a_bucket_are_the_examples_in_every_call",
    ),
    Mutant(
        name="a graph is replayed over weights that have moved",
        source="TensorRT-LLM#17110 (row 84)",
        file="loop/runners.py",
        old="return *weight_addresses(*modules), *dtypes, *map(repr, kept)",
        new="return tuple(map(repr, kept))",
        caught_by=_STEPS + "test_weights_that_moved_and_settings_that_changed_are_captured_anew",
    ),
    Mutant(
        name="a captured function takes inputs of another shape",
        source="xLLM-AI/xllm#1939, vllm#32591 (rows 85, 86)",
        file="graphs/capture.py",
        old='_check_spec("input", self._spec, _specify(inputs))',
        new="pass",
        caught_by="graphs/test_capture.py::"
        "test_other_inputs_than_captured_are_refused_and_nothing_is_computed[another number]",
    ),
    Mutant(
        name="a shorter draft counts as a whole one",
        source="vllm#41162, vllm-ascend#15461 (row 87)",
        file="loop/step.py",
        old="state.all_valid if is_whole else state.all_valid.clamp(max=width)",
        new="state.all_valid",
        caught_by=_STEPS + "test_the_draft_length_may_change_from_step_to_step[model]",
    ),
    Mutant(
        name="a tensor that a step replaced is not noticed",
        source="TensorRT-LLM#17110 (row 84)",
        file="loop/check.py",
        old="self._storage.check()",
        new="pass",
        caught_by=_STEPS + "test_check_catches_a_tensor_that_is_bound_to_a_new_one",
    ),
    Mutant(
        name="graphs outlive the communicators of their collectives",
        source="pytorch#115388, vllm#39846",
        file="graphs/communicators.py",
        old="member.captured.add(captured)",
        new="pass",
        caught_by="graphs/test_communicators.py::"
        "test_captured_functions_are_released_before_any_group_is_shut_down[0]",
    ),
]
