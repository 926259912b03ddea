"""How the Triton kernels are launched on a GPU: `python -m pytest -m gpu`.

No operation waits for the host, each is at most three launches and one CUDA graph, and neither the
programs of a launch overtake each other nor a launch what came before it.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux only")

import triton
import triton.language as tl
from kernel_cases import (
    DTYPES,
    LARGEST_UNIFORM,
    RULES,
    VOCAB,
    Case,
    assert_equal,
    decided,
    on_gpu,
    random_case,
    random_truncation,
)

from specdec.kernels import find_floor, race, sample
from specdec.kernels.gate import Truncation

pytestmark = pytest.mark.gpu
INPUTS = ["draft_tokens", "draft_probs", "logits", "accept", "resample"]


def all_ops(case: Case) -> dict:
    """Every operation on a case, as functions without arguments."""
    rows, places = case.logits.shape[:2]
    truncation = on_gpu(random_truncation(rows, 1)[:3])
    key = torch.arange(2 * rows, device="cuda").view(rows, 2)
    position = torch.arange(rows * places, device="cuda").view(rows, places)
    draws = torch.linspace(0, 0.99, rows * places, dtype=torch.float64, device="cuda")
    ops = {rule: lambda rule=rule: decided(case, rule) for rule in RULES}
    ops["sample"] = lambda: sample(case.logits, case.gate, draws.view(rows, places))
    ops["race"] = lambda: (race(case.logits, case.gate, key, position, 3),)
    ops["floor"] = lambda: find_floor(
        case.logits, case.gate.temperature, Truncation(*truncation, 60)
    )
    return ops


def test_no_operation_waits_for_the_host_and_each_is_one_graph_of_three_launches_at_most():
    case = random_case(4, 3, 9001, 1, dtype=torch.bfloat16, is_gated=True).cuda()
    for name, op in all_ops(case).items():
        expected = [t.clone() for t in op()]
        torch.cuda.set_sync_debug_mode("error")
        try:
            op()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            op()
            torch.cuda.synchronize()
        launches = [e.name for e in profile.events() if e.device_type.name == "CUDA"]
        assert 1 <= len(launches) <= 3, (name, launches)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = op()
        for result in results:
            result.zero_()
        for _ in range(2):
            graph.replay()
        assert_equal(tuple(results), tuple(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_repetitions_give_one_floor(dtype):
    logits = (3 * torch.randn(16, 6, VOCAB, device="cuda")).to(dtype)
    tail = torch.full((16,), 0.1, dtype=torch.float64, device="cuda")
    top_k = torch.arange(16, device="cuda") % 2 * 50
    expected = find_floor(logits, None, Truncation(top_k, tail, None, 50))
    for _ in range(100):
        assert_equal(find_floor(logits, None, Truncation(top_k, tail, None, 50)), expected)


@pytest.mark.parametrize("rule", RULES)
def test_a_thousand_repetitions_give_one_result(rule):
    """A program that read what another had not written yet would show, sooner or later."""
    case = random_case(64, 5, 32000, 7, dtype=torch.bfloat16, is_gated=False).cuda()
    expected, differs = decided(case, rule), torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        for one, other in zip(decided(case, rule), expected, strict=True):
            differs |= (one != other).any()
    assert not bool(differs)


@triton.jit
def _copy_late(source, target, sums, count, block: tl.constexpr):
    """Lets what comes next start at once, and only then, after 20 microseconds, writes. Before, all
    programs read all that some of them will write, so that every multiprocessor has it at hand.
    """
    tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((block,), tl.float32)
    for first in range(0, count, block):
        ids = first + tl.arange(0, block)
        total += tl.load(target + ids, ids < count, 0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(total))
    start = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() < start + 20_000:
        pass
    for first in range(tl.program_id(0) * block, count, tl.num_programs(0) * block):
        ids = first + tl.arange(0, block)
        tl.store(target + ids, tl.load(source + ids, ids < count), ids < count)


def late_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    sums = torch.empty(256, device="cuda")
    _copy_late[(len(sums),)](source, target, sums, source.numel(), block=1024)


@pytest.mark.parametrize(
    "copy", [late_copy, lambda source, target: target.copy_(source)], ids=["kernel", "memcpy"]
)
@pytest.mark.parametrize(
    ("op", "last"),
    [(rule, name) for rule in ("chain", "block") for name in INPUTS]
    + [("point", name) for name in INPUTS if name != "draft_probs"]
    + [("sample", "logits"), ("race", "logits")],
)
def test_an_operation_reads_what_was_written_just_before_it(op, last, copy):
    """Its launches start early: one that did not wait would read the inputs of the case before."""
    cases = [random_case(2, 3, 9001, s, dtype=torch.bfloat16, is_gated=False) for s in (1, 2, 3)]
    for case, u in zip(cases, (0.0, LARGEST_UNIFORM, 0.0), strict=True):
        case.accept, case.resample = torch.full_like(case.accept, u), case.resample.contiguous()
    case, *sources = [case.cuda() for case in cases]
    run = all_ops(case)[op]

    def refill_and_run() -> list:
        results = []
        for source in sources:
            for name in sorted(INPUTS, key=last.__eq__):  # all others in their order, then it
                copy(getattr(source, name), getattr(case, name))
            results.append(run())
        return results

    expected = [all_ops(source)[op]() for source in sources]
    first = refill_and_run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = refill_and_run()
    graph.replay()
    for results in (first, captured):
        for result, wanted in zip(results, expected, strict=True):
            assert_equal(result, wanted)


def test_operations_right_behind_each_other_give_what_each_gives_alone():
    """Their tables lie where those of the operation before were, whose last launch still runs; in a
    graph, since the host would be too slow for that.
    """
    ops, generator = [], torch.Generator().manual_seed(1)
    for rows, width, vocab in ((2, 3, 9001), (16, 5, 32000), (1, 1, 128256)):
        case = random_case(rows, width, vocab, rows, dtype=torch.bfloat16, is_gated=False).cuda()
        case.resample = case.resample.contiguous()  # no copy comes between
        ops += all_ops(case).values()
    expected = []
    for op in ops:
        expected.append(op())
        torch.cuda.synchronize()
    order = torch.randint(len(ops), (400,), generator=generator).tolist()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [ops[i]() for i in order]
    graph.replay()
    for i, result in zip(order, results, strict=True):
        assert_equal(result, expected[i])
