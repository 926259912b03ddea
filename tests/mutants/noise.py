"""Mutants of the noise: what it is keyed by, and who takes which of it."""

from mutation import Mutant

NOISE = [
    Mutant(
        name="proposal, acceptance and recovery share their noise",
        source="vllm#47386, vllm#54282 (row 5)",
        file="kernels/philox/reference.py",
        old="counter[..., 2] = torch.arange(num_streams, device=device)[:, None]",
        new="pass",
        caught_by="test_noise.py::"
        "test_uniforms_are_uniform_and_streams_indices_positions_and_seeds_are_independent",
    ),
    Mutant(
        name="the proposal takes its noise past the choke point, from the acceptance's stream",
        source="local-inference-lab/vllm#205 (row 6)",
        file="samplers/drawing.py",
        old="noise.uniform(Stream.PROPOSE)",
        new="noise.uniform(Stream.ACCEPT)",
        caught_by="generator/test_sampling_runs.py::test_texts_have_the_targets_law[model-plain]",
    ),
    Mutant(
        name="noise is used again in the next step",
        source="vllm#54282 (row 5)",
        file="kernels/philox/reference.py",
        old="counter[..., 0] = position[:, None, None]",
        new="pass",
        caught_by="test_noise.py::test_no_uniform_of_many_rows_and_steps_repeats",
    ),
    Mutant(
        name="all places of a draft share one draw",
        source="vllm#47386 (row 5)",
        file="kernels/philox/reference.py",
        old="counter[..., 1] = torch.arange(width, device=device)",
        new="pass",
        caught_by="test_noise.py::test_no_uniform_of_many_rows_and_steps_repeats",
    ),
    Mutant(
        name="every row draws with the first row's seed",
        source="vllm#6034, vllm#6038 (row 20)",
        file="samplers/noise.py",
        old="words = [[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds]",
        new="words = [[seeds[0] & 0xFFFFFFFF, seeds[0] >> 32] for _ in seeds]",
        caught_by="generator/test_row_independence.py::"
        "test_equal_seeds_give_equal_texts_and_other_seeds_other_texts[none]",
    ),
    Mutant(
        name="seeds that differ in their upper half only are one seed",
        source="vllm#6038 (row 20)",
        file="samplers/noise.py",
        old="[seed & 0xFFFFFFFF, seed >> 32]",
        new="[seed & 0xFFFFFFFF, 0]",
        caught_by="test_noise.py::test_no_uniform_of_many_rows_and_steps_repeats",
    ),
    Mutant(
        name="a row's noise depends on its place in the batch",
        source="TensorRT-LLM#17599, 1CatAI/1Cat-vLLM#656 (rows 18, 22)",
        file="samplers/noise.py",
        old="self._key = torch.tensor(words, device=device)",
        new="self._key = torch.tensor(words, device=device) + torch.arange(len(words))[:, None]",
        caught_by="generator/test_row_independence.py::test_the_order_of_the_batch_does_not_matter[perturbed]",
    ),
    Mutant(
        name="a row's noise depends on the padding of the batch",
        source="vllm#17498 (row 23)",
        file="loop/step.py",
        old="noise = state.noise.at(state.buffer.lengths, ",
        new="noise = state.noise.at(state.buffer.lengths - state.buffer.lengths.amax(), ",
        caught_by="generator/test_row_independence.py::test_other_neighbours_do_not_matter[perturbed]",
    ),
    Mutant(
        name="unseeded rows all draw with one fixed seed",
        source="TensorRT-LLM#17599 (row 22)",
        file="request/call.py",
        old="seeds = [secrets.randbits(64) for _ in range(rows)]",
        new="seeds = [0] * rows",
        caught_by="generator/test_row_independence.py::"
        "test_without_a_seed_texts_differ_and_the_reported_seeds_reproduce_them[none]",
    ),
    Mutant(
        name="seeds come from the global generator",
        source="local-inference-lab/vllm#98, feifeibear/LLMSpeculativeSampling (rows 24, 25)",
        file="request/call.py",
        old="seeds = [secrets.randbits(64) for _ in range(rows)]",
        new="import torch; seeds = torch.randint(2**62, (rows,)).tolist()",
        caught_by="generator/test_row_independence.py::test_no_global_generator_is_consumed[none-options1]",
    ),
    Mutant(
        name="a uniform may be 1",
        source="sglang#35771 (row 7)",
        file="kernels/philox/reference.py",
        old="((high << 20) | (low >> 12)).double()",
        new="(((high << 20) | (low >> 12)) + 1).double()",
        caught_by="test_noise.py::"
        "test_a_uniform_is_52_bits_of_philox_keyed_by_seed_position_stream_and_index",
    ),
    Mutant(
        name="coupled noise belongs to the step, not to the position in the text",
        source="vllm#54282, TensorRT-LLM#17599 (rows 5, 22)",
        file="samplers/noise.py",
        old="positions = self._start[:, None] + offsets",
        new="positions = self._start[:, None] + 0 * offsets",
        caught_by="test_coupling.py::test_the_text_is_that_of_plain_decoding[perturbed-3]",
    ),
    Mutant(
        name="the drafter races one position behind the target",
        source="ml-explore/mlx-swift-lm#459 (row 11)",
        file="samplers/drawing.py",
        old="return noise.race(logits, warp, index), None",
        new="return noise.race(logits, warp, index + 1), None",
        caught_by="test_coupling.py::test_the_text_is_that_of_plain_decoding[itself-3]",
    ),
    Mutant(
        name="a row that moves takes the randomness of the one that it replaces",
        source="vllm#14645, vllm-ascend#16396 (rows 48, 49)",
        file="samplers/noise.py",
        old="keep_rows(self._key, rows)",
        new="self._key[: len(rows)]",
        caught_by="loop/test_dropped_rows.py::"
        "test_a_row_of_a_batch_that_shrinks_is_the_row_alone[none-6-block]",
    ),
]
