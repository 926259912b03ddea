"""Mutants of ragged attention and of the write before it."""

from mutation import Mutant

ATTENTION = [
    Mutant(
        name="values beyond a row's length are loaded, and 0 times NaN is NaN",
        source="flash-attention#1745, flash-attention#2374",
        file="kernels/attention/triton.py",
        old="_load_columns(here, offsets, is_slot, 0, padded_value_width, value_width)",
        new="_load_columns(here, offsets, local >= 0, 0, padded_value_width, value_width)",
        caught_by="kernels/test_kernels_attention.py::"
        "test_lengths_at_the_edges_of_tiles_are_read_to_their_end",
    ),
    Mutant(
        name="a tile without a visible slot is NaN",
        source="pegainfer#21",
        file="kernels/attention/triton.py",
        old="origin = tl.where(new_max == -INFINITY, 0.0, new_max)  # -inf - -inf would be NaN",
        new="origin = new_max",
        caught_by="kernels/test_kernels_attention.py::test_the_kernels_are_the_definition",
    ),
    Mutant(
        name="splits that had no slots are merged",
        source="pegainfer#21",
        file="kernels/attention/triton.py",
        old="used = tl.maximum((end - begin + share - 1) // share, 1)",
        new="used = a.num_splits",
        caught_by="kernels/test_kernels_attention.py::"
        "test_lengths_at_the_edges_of_tiles_are_read_to_their_end",
    ),
    Mutant(
        name="the merged result is written by another layout than it is read",
        source="FlagGems#5235",
        file="kernels/attention/triton.py",
        old="    at = (tl.cast(row, tl.int64) * a.num_queries + index) * num_heads + head\n"
        "    pointers",
        new="    at = (tl.cast(row, tl.int64) * num_heads + head) * a.num_queries + index\n"
        "    pointers",
        caught_by="kernels/test_kernels_attention.py::test_the_kernels_are_the_definition",
    ),
    Mutant(
        name="every split of a row has the sink",
        source="flash-decoding with attention sinks",
        file="kernels/attention/triton.py",
        old="row_max = tl.where(split == 0, sink, row_max)\n"
        "            row_sum += tl.where(split == 0, 1.0, 0.0)",
        new="row_max = sink\n            row_sum += 1.0",
        caught_by="kernels/test_kernels_attention.py::"
        "test_a_sink_takes_its_weight_once_however_many_splits_a_row_has[2]",
    ),
    Mutant(
        name="a query head reads the keys of another group",
        source="heads interleaved instead of grouped",
        file="kernels/attention/triton.py",
        old="kv_head * a.group + query_row % a.group",
        new="kv_head + query_row % a.group * a.num_kv_heads",
        caught_by="kernels/test_kernels_attention.py::test_the_kernels_are_the_definition",
    ),
    Mutant(
        name="the kernel's sliding window is one slot too wide",
        source="transformers#48280, transformers#46629 (row 32)",
        file="kernels/attention/triton.py",
        old="seen &= slot[None] > query_slot[:, None] - a.sliding_window",
        new="seen &= slot[None] >= query_slot[:, None] - a.sliding_window",
        caught_by="kernels/test_kernels_attention.py::test_the_kernels_are_the_definition",
    ),
    Mutant(
        name="a block's tokens see what lies before the sliding window",
        source="transformers#48280 (row 32)",
        file="target/masks.py",
        old="return Predicate(visible, None if None in windows else max(windows))",
        new="return Predicate(visible)",
        caught_by="heads/test_window.py::"
        "test_every_pass_attends_to_what_its_predicate_shows[raggedly-sliding block]",
    ),
    Mutant(
        name="the kernel writes the keys of every row into row 0",
        source="vllm#14645, Blaizzy/mlx-vlm#1155 (rows 48, 50)",
        file="kernels/write_slots/triton.py",
        old="_start_of(copy.target, row, head, slot)",
        new="_start_of(copy.target, 0, head, slot)",
        caught_by="kernels/test_kernels_write_slots.py::"
        "test_a_cache_that_writes_by_the_kernel_is_the_same",
    ),
]
