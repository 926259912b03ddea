"""Compiles every Triton kernel for a Hopper GPU, on a machine that needs to have none: a program
for `test_kernels_compile`, which runs it without Triton's interpreter. Its arguments are data
types; with "checked" each kernel only passes the compiler's checks of the language.

Triton asks a driver what to compile for, and hands it what it compiled. Here the driver knows of
one kind of GPU and has none, and every launch ends when its kernel is compiled.
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from specdec.kernels import AttentionOptions, FilterParams
from specdec.kernels.attention import triton as triton_attention
from specdec.kernels.linear import triton as triton_linear
from specdec.kernels.philox import triton as triton_philox
from specdec.kernels.race import triton as triton_race
from specdec.kernels.sample import triton as triton_sample
from specdec.kernels.slots import triton as triton_write_slots
from specdec.kernels.truncate import triton as triton_truncate
from specdec.kernels.types import Cutoff, Truncation, VerifyUniforms
from specdec.kernels.verify import triton as triton_verify
from specdec.types import Draft

ROWS, WIDTH, VOCAB = 4, 3, 9001


class NoDevice:
    """The driver of a Hopper GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class CheckedError(Exception):
    """A kernel is sound Triton."""


def compile_only(*, is_checked: bool) -> None:
    """From here on no kernel is launched; with `is_checked` none is compiled to the end."""
    driver.set_active(NoDevice())
    run = JITFunction.run

    def compiled(self, *args, grid, warmup, **kwargs):
        try:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
            print(self.__name__, len(kernel.asm["cubin"]))
        except CheckedError:
            print(self.__name__, "checked")

    def stop(*args):
        raise CheckedError

    JITFunction.run = compiled
    if is_checked:
        CUDABackend.make_ttgir = stop


def compile_all(dtype: torch.dtype, *, is_filtered: bool) -> None:
    """Every operation, as the library calls it."""
    shape = ROWS, WIDTH + 1
    logits, probs = torch.zeros(*shape, VOCAB, dtype=dtype), torch.zeros(ROWS, WIDTH, VOCAB)
    tokens, draws = torch.zeros(ROWS, WIDTH).long(), torch.zeros(shape, dtype=torch.float64)
    params, num_valid = FilterParams(), None
    if is_filtered:
        cutoff = Cutoff(torch.zeros(shape), torch.zeros(shape).long())
        params = FilterParams(draws[:, 0] + 1, torch.zeros(ROWS).bool(), cutoff)
        num_valid = tokens[:, 0]
    uniforms = VerifyUniforms(draws[:, :WIDTH], draws[:, 0])
    for draft_probs, by_block in ((None, False), (probs, False), (probs, True)):
        draft = Draft(tokens, draft_probs, num_valid)
        triton_verify.verify(draft, logits, params, uniforms, by_block=by_block)
    triton_sample.sample(logits, params, draws, torch.zeros(*shape, VOCAB))
    triton_sample.sample(logits, params, draws, None)
    triton_race.race(logits, params, torch.zeros(ROWS, 2).long(), torch.zeros(shape).long(), 3)
    triton_philox.step_uniforms(torch.zeros(ROWS, 2).long(), tokens[:, 0], 3, WIDTH + 1)
    truncation = Truncation(tokens[:, 0] + 5, draws[:, 0], draws[:, 0], 5)
    triton_truncate.find_cutoff(logits, params.temperature, truncation)


def compile_attention(dtype: torch.dtype) -> None:
    """With all options, over rows that are split; plain, over rows that are not; and the write
    before.
    """
    for rows, queries, key_width, value_width in ((64, 4, 128, 128), (1, 9, 192, 128)):
        query = torch.zeros(rows, 16, queries, key_width, dtype=dtype)
        keys = torch.zeros(rows, 256, 4, key_width, dtype=dtype).transpose(1, 2)
        values = torch.zeros(rows, 256, 4, value_width, dtype=dtype).transpose(1, 2)
        options = AttentionOptions()
        if rows == 1:
            visible = torch.zeros(rows, queries, queries).bool()
            options = AttentionOptions(0.1, 50.0, query[0, :, 0, 0], 128, visible, num_first=4)
        slots = torch.zeros(rows, queries).long()
        triton_attention.ragged_attention(query, keys, values, slots, options)
    for stored in (values, values[..., :0]):  # layers may have no values
        storage = keys.transpose(1, 2), stored.transpose(1, 2)
        window = keys[:, :, :queries], stored[:, :, :queries]
        triton_write_slots.write_slots(*storage, *window, slots)


def compile_linear(dtype: torch.dtype) -> None:
    """In shares with a bias, and in one without."""
    for count, outputs, kind in ((4, 200, torch.int8), (40, 2**17, torch.float8_e4m3fn)):
        x, scale = torch.zeros(count, 256, dtype=dtype), torch.zeros(outputs)
        weight = torch.zeros(outputs, 256).to(kind)
        triton_linear.scaled_linear(x, weight, scale, scale if count == 4 else None)


if __name__ == "__main__":
    compile_only(is_checked="checked" in sys.argv)
    for dtype in (torch.bfloat16, torch.float32):
        if str(dtype).removeprefix("torch.") in sys.argv:
            compile_all(dtype, is_filtered=dtype == torch.bfloat16)
            compile_attention(dtype)
            compile_linear(dtype)
