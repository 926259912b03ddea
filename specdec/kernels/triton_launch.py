"""How programs wait for others: those of the launch before, and those of their own.

Launches overlap: each of ours starts while the one of ours before it ends, so that its start costs
nothing. Every program waits before it writes, and the first launch of an operation before it reads
too. Only behind its wait does a launch let the next one start, so of all that came before, at most
the launch right before can still be running. That is why the second may read an operation's inputs
before it waits; from the cache that all multiprocessors share, since their own may still hold what
was there earlier. (A foreign kernel that starts early and never waits has no place behind ours.)

Within a launch there are two ways. Who comes last at a counter goes on, and nobody waits
(`announce`; only for a floor, whose programs need each other's results, they `wait`). By the block
rule, where programs of many kinds follow each other closely, they tell each other words of 32 bits,
which an earlier launch has cleared, and each of which says by itself whether it is written: nobody
counts, and no write has to come before another.

Within a launch a program waits only for programs of lower ids. GPUs start programs in the order of
their ids (CUDA does not promise it; NVIDIA's own scan, CUB's DeviceScan, relies on it too), so
those are done or running, and no wait is for ever, however few run at a time: the next launch does
not start before all of these have. Triton's interpreter runs one after the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SHARED = tl.constexpr(".cg")  # how to read what may be read before `wait_for_last`
UNWRITTEN = tl.constexpr(-2)  # no token, no place, and of floats a NaN that arithmetic never makes
_CLEARED = 1024  # words by one program


def overlap(tensor: Tensor) -> dict[str, bool]:
    """Options of a launch that starts while the one before it ends, where the tensor's device can
    do this.
    """
    if tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (9, 0):
        return {"is_early": True, "launch_pdl": True}
    return {"is_early": False}


@triton.jit
def wait_for_last(is_early: tl.constexpr):
    """Behind this the launch before has ended, as have all before that; and the next may start as
    soon as every program has come here or is over. Some program of each launch must come here.
    """
    if is_early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def new_words(sizes: list[int], device: torch.device) -> list[Tensor]:
    """int32 tables of the given sizes of which nothing is written; to be used by a launch that may
    `overlap` this one, behind `wait_for_last`.
    """
    aligned = [triton.cdiv(size, 4) * 4 for size in sizes]  # so that all are compiled for alike
    words = torch.empty(sum(aligned), dtype=torch.int32, device=device)
    programs = triton.cdiv(len(words), _CLEARED)
    _clear_kernel[(programs,)](words, len(words), block=_CLEARED, **overlap(words))
    return [table[:size] for table, size in zip(words.split(aligned), sizes, strict=True)]


@triton.jit
def _clear_kernel(words, count, is_early: tl.constexpr, block: tl.constexpr):
    wait_for_last(is_early)
    place = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(words + place, tl.full((block,), UNWRITTEN, tl.int32), mask=place < count)


@triton.jit
def write(pointers, words, mask=None):
    """Writes words of 32 bits that others may be waiting for: a plain store, which GPUs make of
    each word whole, in the cache that all programs share.
    """
    tl.store(pointers, words, mask=mask)


@triton.jit
def peek(pointers, mask=True):
    """Words that others may be writing, 0 beyond the mask."""
    return tl.load(pointers, mask, 0, volatile=True)


@triton.jit
def is_missing(words):
    """1 where a word is not written yet, else 0."""
    return (words.to(tl.int32, bitcast=True) == UNWRITTEN).to(tl.int32)


@triton.jit
def read_pairs(pointers, others, mask):
    """Two tables of words `[P, C]`, when all of both are written; 0 beyond the mask."""
    while tl.max(is_missing(peek(pointers, mask)) | is_missing(peek(others, mask))) > 0:
        pass
    return peek(pointers, mask), peek(others, mask)  # a word may be in several threads: all reread


@triton.jit
def announce(counter):
    """Tells the others that what this program wrote can be read; returns how many told so before,
    whose writes can be read from here on.
    """
    tl.debug_barrier()  # every thread wrote
    return tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def wait(counter, count):
    """Waits until `count` programs have announced."""
    while tl.atomic_add(counter, 0, sem="acquire") < count:
        pass
