"""All programs of a launch at once give what Triton's own interpreter gives one by one."""

import os
from contextlib import nullcontext

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here"
)


@triton.jit
def _scaled(x, scale):
    return tl.exp(x) * scale


@triton.jit
def _kernel(out, found, weights, lengths, stride, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):  # noqa: N803
    """Loops and branches that differ by program, tiles, scans and reductions."""
    row, column = tl.program_id(0), tl.program_id(1)
    length, total, best = tl.load(lengths + row), 0.0, -1
    for step in range(length):
        total += tl.load(weights + row * stride + step)
    for start in tl.static_range(0, ROUNDS):
        at = start * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(weights + row * stride + at, mask=at < length, other=0.0)
        is_far = (tl.cumsum(values, axis=0) > 0.5).to(tl.int32)
        if best < 0 and tl.max(is_far, axis=0) == 1:
            best = start * BLOCK + tl.argmax(is_far, axis=0)
        total += tl.sum(_scaled(tl.where(at < length, values, float("-inf")), 2.0)) * (column + 1)
    while total > 20.0:
        total -= 7.0
    tl.store(out + row * 2 + column, total)
    if row % 3 != 0:
        tl.store(found + row * 2 + column, best)


@pytest.mark.parametrize("tiles", [{"BLOCK": 2, "ROUNDS": 3}, {"BLOCK": 64, "ROUNDS": 1}], ids=str)
def test_all_programs_at_once_do_what_they_do_one_by_one(tiles):
    from examples import triton_rows

    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(40, 6, generator=generator)
    lengths = torch.randint(0, 7, (40,), generator=generator)
    results = []
    for context in (triton_rows.all_programs_at_once(block=16), nullcontext()):
        out, found = torch.zeros(40, 2), torch.full((40, 2), -9)
        with context:
            _kernel[(40, 2)](out, found, weights, lengths, 6, **tiles)
        results.append((out, found))
    assert torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-6, atol=1e-6)
    assert len(results[0][1].unique()) > 3
