"""Compiles every Triton kernel for a Hopper GPU, on a machine that needs to have none: a program
for `test_kernels_compile`, which runs it without Triton's interpreter.

Triton asks a driver what to compile for, and hands it what it compiled. Here the driver knows of
one kind of GPU and has none, and every launch ends when its kernel is compiled.
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from specdec.kernels import triton_floor, triton_race, triton_sample, triton_verify
from specdec.kernels.gate import Floor, Gate, Truncation

ROWS, WIDTH, VOCAB = 4, 3, 9001


class NoDevice:
    """The driver of a Hopper GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> None:
    """From here on no kernel is launched; and launches overlap, as on a Hopper GPU."""
    driver.set_active(NoDevice())
    run = JITFunction.run

    def compiled(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        print(self.__name__, len(kernel.asm["cubin"]))
        return kernel

    JITFunction.run = compiled
    for name, module in sys.modules.items():
        if name.startswith("specdec.kernels.") and hasattr(module, "overlap"):
            module.overlap = lambda tensor: {"is_early": True, "launch_pdl": True}


def compile_all(dtype: torch.dtype, *, is_gated: bool) -> None:
    """Every operation, as the library calls it."""
    shape = ROWS, WIDTH + 1
    logits, probs = torch.zeros(*shape, VOCAB, dtype=dtype), torch.zeros(ROWS, WIDTH, VOCAB)
    tokens, draws = torch.zeros(ROWS, WIDTH).long(), torch.zeros(shape, dtype=torch.float64)
    gate, num_valid = Gate(), None
    if is_gated:
        floor = Floor(torch.zeros(shape), torch.zeros(shape).long())
        gate = Gate(draws[:, 0] + 1, torch.zeros(ROWS).bool(), floor)
        num_valid = tokens[:, 0]
    uniforms = draws[:, :WIDTH], draws[:, 0]
    for laws, by_block in ((None, False), (probs, False), (probs, True)):
        triton_verify.verify(tokens, laws, num_valid, logits, gate, *uniforms, by_block=by_block)
    triton_sample.sample(logits, gate, draws)
    triton_race.race(logits, gate, torch.zeros(ROWS, 2).long(), torch.zeros(shape).long(), 3)
    truncation = Truncation(tokens[:, 0] + 5, draws[:, 0], draws[:, 0], 5)
    triton_floor.find_floor(logits, gate.temperature, truncation)


if __name__ == "__main__":
    compile_only()
    compile_all(torch.bfloat16, is_gated=True)
    compile_all(torch.float32, is_gated=False)
