"""Law 17, "owned": after a capture all memory that is free may be unmapped or written by others,
and replays neither notice nor touch it: `python -m pytest -m gpu tests/graphs/test_gpu_owned.py`,
alone on its GPU, whose memory it fills.

What others do to a process stands in OTHERS. After it all free memory is filled with a pattern, and
replays must equal what was computed eagerly before, with the pattern as it was. The products are
wide and of few rows, so that cuBLAS splits them and needs its workspace. A fault may also show as
an illegal memory access, after which no later test of the process can pass.
"""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from steps import account
from torch import Tensor, nn
from torch import _inductor as inductor
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import ModelDrafter, PromptLookupDrafter, SpeculativeGenerator
from specdec.graphs import Captured
from specdec.graphs.capture import GraphPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "PYTEST_XDIST_WORKER" in os.environ, reason="fills the memory of the GPU: run it alone"
    ),
]
PATTERN = 0x5A5A5A5A5A5A5A5A
MIB = 2**20
ROOM = 6 * 2**30
"""Bytes that are left for what runs beside the pattern."""
SHAPES = [(14336, 4096), (4096, 14336), (4096, 1024), (8192, 256)]


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def clear() -> None:
    """As `torch.compile` does around its captures; and what is free is unmapped."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def pattern_in_free_memory() -> Iterator[None]:
    """Fills it in blocks of the sizes that workspaces and small tensors have had, and in large
    ones; raises if a byte was written meanwhile.
    """
    clear()
    blocks = []
    for size, count in ((32 * MIB, 64), (8 * MIB, 64), (2 * MIB, 256), (512 * MIB, 10**6)):
        while count and free_bytes() > ROOM + size:
            blocks.append(torch.full((size // 8,), PATTERN, device="cuda"))
            count -= 1
    torch.cuda.synchronize()
    assert len(blocks) > 300
    try:
        yield
        torch.cuda.synchronize()
        changed = [i for i, block in enumerate(blocks) if {*map(int, block.aminmax())} != {PATTERN}]
        assert not changed, f"{len(changed)} of {len(blocks)} blocks were written to"
    finally:
        blocks.clear()


class Wide(nn.Module):
    """Products that cuBLAS splits, of few rows; in bfloat16, as models have them."""

    def __init__(self, seed: int = 0):
        super().__init__()
        generator = torch.Generator("cuda").manual_seed(seed)
        options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
        self.weights = nn.ParameterList(
            torch.randn(shape, **options) / shape[0] ** 0.5 for shape in SHAPES
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """Of `x` `[M, 14336]`: one product after the other, and those that are split the most."""
        up, down, narrow, last = self.weights
        y = x @ up
        z = (y @ down).tanh()
        return [y, z, y @ narrow, z[:, :8192] @ last, (x.float() @ up.float()).sum(dim=1)]


def inputs(count: int = 4, rows: int = 4) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(7)
    shape = rows, SHAPES[0][0]
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    return [torch.randn(shape, **options) for _ in range(count)]


def expected_of(module: nn.Module, xs: list[Tensor]) -> list[list[Tensor]]:
    with torch.inference_mode():
        found = [module(x) for x in xs]
    torch.cuda.synchronize()
    return found


def are_equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module", name="wide")
def _wide():
    yield Wide()
    clear()


@pytest.fixture(scope="module", name="model")
def _model():
    """Of a width at which its products are split; two layers, so that it compiles quickly."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    torch.manual_seed(0)
    # Not under `torch.device("cuda")`, which does not reach the `torch.empty` of conftest.py.
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8192, **sizes, **heads, **special))
    yield model.to("cuda", torch.bfloat16).eval()
    torch.compiler.reset()
    clear()


def other_graphs(module: nn.Module, x: Tensor) -> None:
    """Captured on every stream that torch has, replayed and released; torch's own and ours."""
    with torch.inference_mode():
        for stream in [torch.cuda.Stream() for _ in range(33)]:
            with torch.cuda.stream(stream):
                module(x)
        torch.cuda.synchronize()
        own = torch.cuda.CUDAGraph()
        with torch.cuda.graph(own):
            module(x)
        own.replay()
    others = [Captured(module, (x,)) for _ in range(3)]
    for other in others:
        other(x)
    others[0].release()
    torch.cuda.synchronize()
    del own, others, other


def compiled(module: nn.Module, x: Tensor, *, mode: str) -> None:
    """The same module, compiled; called as often as its graphs need."""
    torch.compiler.reset()
    run = torch.compile(module, mode=mode, dynamic=False)
    of_blas = inductor.config.patch(max_autotune_gemm_backends="ATEN")  # tunes within seconds
    with torch.inference_mode(False), torch.no_grad(), of_blas:
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            run(x)
    torch.cuda.synchronize()


def other_generator(module: nn.Module, x: Tensor) -> None:
    """Captures, writes and is given up."""
    ids = torch.arange(24, device="cuda")[None] % 7
    config = LlamaConfig(
        vocab_size=128, hidden_size=1024, intermediate_size=4096, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=8, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    target = LlamaForCausalLM(config).cuda().eval()
    generator = SpeculativeGenerator(target, PromptLookupDrafter(3), graphs=True)
    generator.generate(ids, max_new_tokens=40, check=True)
    assert "captured in" in generator.explain()
    generator.release()


def other_thread(module: nn.Module, x: Tensor) -> None:
    """Computes and captures on a stream of its own, and ends."""
    failures = []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                other_graphs(module, x)
        except BaseException as error:  # a thread's own would be printed and forgotten
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures, failures


OTHERS = {
    "clears": lambda module, x: clear(),
    "captures": other_graphs,
    "generates": other_generator,
    "works in a thread": other_thread,
    "compiles": partial(compiled, mode="default"),
    "compiles with graphs": partial(compiled, mode="reduce-overhead"),
}
"""What others do between two replays."""
TUNES = {"compiles and tunes": partial(compiled, mode="max-autotune-no-cudagraphs")}


def test_nothing_that_a_graph_uses_is_freed_by_who_clears_workspaces(wide):
    """The structure, without a fault that has to show: there is nothing left to clear."""
    (x,) = inputs(1)
    clear()
    captured = Captured(wide, (x,))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == before
    assert captured.num_bytes > 0


@pytest.mark.parametrize("others", OTHERS | TUNES)
def test_replays_of_a_function_equal_its_eager_calls_whatever_others_do(wide, others):
    xs = inputs()
    expected = expected_of(wide, xs)
    captured = Captured(wide, (xs[0],))
    assert are_equal(captured(xs[1]), expected[1])
    (OTHERS | TUNES)[others](wide, xs[2])
    with pattern_in_free_memory():
        for x, outputs in zip(xs * 3, expected * 3, strict=True):
            assert are_equal(captured(x), outputs)
    captured.release()
    with pattern_in_free_memory():  # captured anew, in the memory that is left
        for x, outputs in zip(xs, expected, strict=True):
            assert are_equal(captured(x), outputs)
    checked = Captured(wide, (xs[0],), check=True)
    (OTHERS | TUNES)[others](wide, xs[2])
    for x, outputs in zip(xs, expected, strict=True):
        assert are_equal(checked(x), outputs)


def test_graphs_of_one_pool_outlive_each_other(wide):
    """One is released, one is dropped, and others are captured into what they leave."""
    pool, xs = GraphPool("cuda"), inputs()
    few = [x[:1].contiguous() for x in xs]
    expected, expected_few = expected_of(wide, xs), expected_of(wide, few)
    graphs = [Captured(wide, (xs[0],), pool=pool) for _ in range(3)]
    graphs += [Captured(wide, (few[0],), pool=pool, warmup=i) for i in (0, 1)]

    def check_all():
        for index in range(len(xs)):
            for graph in graphs:
                is_wide = graph._inputs[0].shape == xs[0].shape
                x, outputs = (xs, expected) if is_wide else (few, expected_few)
                assert are_equal(graph(x[index]), outputs[index])

    check_all()
    graphs[0].release()
    del graphs[1]
    with pattern_in_free_memory():
        check_all()  # the released one is captured again
    graphs.append(Captured(wide, (few[0],), pool=pool))
    del graphs[0]
    with pattern_in_free_memory():
        check_all()


def test_a_thread_that_has_computed_nothing_captures(wide):
    xs, found = inputs(), []
    expected = expected_of(wide, xs)
    captured = Captured(wide, (xs[0],))
    captured.release()
    thread = threading.Thread(target=lambda: found.extend(x.clone() for x in captured(xs[1])))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert are_equal(found, expected[1])
    with pattern_in_free_memory():
        assert are_equal(captured(xs[2]), expected[2])


def test_a_thread_computes_and_captures_while_another_one_replays(wide):
    xs = inputs()
    expected = expected_of(wide, xs)
    captured, has_ended, failures = Captured(wide, (xs[0],)), threading.Event(), []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
                for index in range(12):
                    x, outputs = xs[index % 4], expected[index % 4]
                    assert all(are_equal(wide(x), outputs) for _ in range(20))
                    own = Captured(wide, (x,))
                    assert all(are_equal(own(x), outputs) for _ in range(20))
                    own.release()
        except BaseException as error:
            failures.append(error)
        has_ended.set()

    thread, num_replays = threading.Thread(target=work), 0
    with pattern_in_free_memory():
        thread.start()
        while not has_ended.is_set() or num_replays < 40:
            index = num_replays % 4
            assert are_equal(captured(xs[index]), expected[index])
            num_replays += 1
        thread.join()
    assert not failures, failures


DRAFTERS = {
    "none": lambda model: None,
    "lookup": lambda model: PromptLookupDrafter(3),
    "model": lambda model: ModelDrafter(model, 3),
}
CALL = {"max_new_tokens": 48, "do_sample": True, "temperature": 0.8, "seed": 3}


def prompt(rows: int = 1) -> Tensor:
    return torch.arange(1, 65, device="cuda").repeat(rows, 1) % 61


def model_as_others_use_it(model: nn.Module) -> nn.Module:
    """A module over tokens, for `compiled` and `other_graphs`, with a mask of four dimensions."""
    mask = torch.full((64, 64), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16).cuda()
    mask = mask.triu(1)[None, None]

    class Forward(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids, attention_mask=mask, use_cache=False).logits

    return Forward()


PAIRS = [("lookup", name) for name in OTHERS]
PAIRS += [(drafter, name) for drafter in ("none", "model") for name in ("clears", "captures")]
PAIRS += [("model", "compiles with graphs")]


@pytest.mark.parametrize(("drafter", "others"), PAIRS)
def test_steps_of_a_generator_equal_eager_ones_whatever_others_do(model, drafter, others):
    """`check=True` takes every step eagerly too, and compares all that it reports."""
    generator = SpeculativeGenerator(model, DRAFTERS[drafter](model), graphs=True)
    options = {name: value for name, value in CALL.items() if name != "max_new_tokens"}
    generator.warm_up(1, 128, **options)
    expected = account(generator.generate(prompt(), **CALL, check=True))
    (storage,) = generator._storages
    before = {id(graph): graph.num_calls for graph in storage.replay.all_graphs}
    assert len(before) >= 3  # a step, and prompt chunks of two sizes
    OTHERS[others](model_as_others_use_it(model), prompt())
    with pattern_in_free_memory():
        assert account(generator.generate(prompt(), **CALL)) == expected
        assert account(generator.generate(prompt(), **CALL, check=True)) == expected
    after = {id(graph): graph.num_calls for graph in storage.replay.all_graphs}
    assert before.keys() == after.keys()  # graphs of before were replayed, none captured anew
    assert sum(after.values()) >= sum(before.values()) + 20
