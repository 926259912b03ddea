"""Captured functions with collectives are released before their communicators; here over gloo, in a
process group of one. (Two processes, and NCCL: `tests/parallel/test_parallel_targets.py`.)
"""

import gc
import weakref

import pytest
import torch
from architectures import VOCAB, build
from drafting import ragged_prompts
from torch import distributed
from torch.distributed import destroy_process_group  # the name as a user imports it, before

from specdec import PromptLookupDrafter, SpeculativeGenerator
from specdec.graphs import Captured

X = torch.tensor([1.0, 2.0])


@pytest.fixture(name="begin")
def _begin(tmp_path):
    """Makes a process group of this process; ends it where the test has not."""
    addresses = (f"file://{tmp_path}/meeting_{i}" for i in range(9))

    def begin() -> None:
        options = {"init_method": next(addresses), "rank": 0, "world_size": 1}
        distributed.init_process_group("gloo", **options)

    begin()
    yield begin
    if distributed.is_initialized():
        destroy_process_group()


def summed(x):
    """Over all processes."""
    x = 2 * x
    distributed.all_reduce(x)
    return x


def record_order(monkeypatch) -> list[str]:
    """The releases and shutdowns from now on, in order."""
    order, release, shutdown = [], Captured.release, distributed.ProcessGroup.shutdown
    for owner, name, method in (
        (Captured, "release", release),
        (distributed.ProcessGroup, "shutdown", shutdown),
    ):
        monkeypatch.setattr(
            owner, name, lambda self, n=name, m=method: (order.append(n), m(self))[1]
        )
    return order


@pytest.mark.parametrize("again", [0, 1])
def test_captured_functions_are_released_before_any_group_is_shut_down(begin, monkeypatch, again):
    for _ in range(again):  # another world before: its members are not those of now
        Captured(summed, (X,))
        destroy_process_group()
        begin()
    distributed.new_group([0])
    captured = [Captured(summed, (X,)), Captured(lambda x: x + 1, (X,))]
    outputs = [one(X) for one in captured]
    order = record_order(monkeypatch)
    destroy_process_group()
    assert order == ["release"] * 2 + ["shutdown"] * 2
    assert [one.outputs for one in captured] == [None, None]
    assert outputs[0].equal(2 * X)  # a tensor that was returned stays the caller's


def test_a_function_without_collectives_is_captured_again(begin):
    captured, collective = Captured(lambda x: x + 1, (X,)), Captured(summed, (X,))
    before = captured(X)
    collective(X)
    destroy_process_group()
    with pytest.raises(ValueError, match="process group has not been initialized"):
        collective(X)
    assert captured(5 * X).equal(5 * X + 1)
    assert before.equal(X + 1)
    assert captured(7 * X) is captured(X)
    assert captured.num_calls == 4


def test_the_process_group_keeps_nothing_alive(begin):
    captured = Captured(summed, (X,))
    captured(X)
    is_there = weakref.ref(captured)
    gc.collect()
    gc.disable()
    try:
        del captured
        assert is_there() is None
    finally:
        gc.enable()


def test_a_generator_and_its_unfinished_generation_outlive_the_process_group(begin):
    generator = SpeculativeGenerator(build("llama"), PromptLookupDrafter(3), graphs=True)
    prompts = ragged_prompts(VOCAB, 3, 5)
    expected = generator.generate(*prompts, max_new_tokens=30).sequences
    generation = generator.start(*prompts, max_new_tokens=30)
    for _ in range(5):
        generator.step(generation)
    destroy_process_group()
    storages = [generation.storage, *generator._storages]
    graphs = [graph for storage in storages for graph in storage.replay.graphs.values()]
    assert graphs
    assert all(graph.outputs is None for graph in graphs)
    while not generation.has_ended.all():
        generator.step(generation)
    rows = zip(generation.tokens, (3, 5), strict=True)
    assert torch.stack([row[n : n + 30] for row, n in rows]).equal(expected[:, 5:])
    assert generator.generate(*prompts, max_new_tokens=30).sequences.equal(expected)
