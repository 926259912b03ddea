"""`stable_storage` names every tensor that a step moved, and no other."""

from collections import deque
from functools import partial

import pytest
import torch
from torch import nn

from specdec.graphs.storage import StorageMovedError, stable_storage


class State:
    """A state with a tensor in every place that there is."""

    transient_attributes = ("scratch",)

    def __init__(self):
        self.lengths = torch.zeros(3)
        self.tables = {"keys": [torch.zeros(2, 4)]}
        self.scratch = None


def shorten(state: State) -> None:
    state.tables["keys"][0] = state.tables["keys"][0][:1]


def transpose(state: State) -> None:
    state.tables["keys"][0] = state.tables["keys"][0].t()


FAULTS = [
    (r"\.lengths was replaced", lambda s: setattr(s, "lengths", s.lengths + 1)),
    (r"\.tables\['keys'\]\[0\] had shape \(2, 4\).*\(1, 4\)", shorten),
    ("strides", transpose),
    (r"\.tables\['keys'\]\[0\] is gone", lambda s: s.tables.clear()),
    (r"\.tables\['more'\] is new", lambda s: s.tables.update(more=torch.zeros(1))),
]


@pytest.mark.parametrize(("message", "fault"), FAULTS)
def test_a_tensor_that_moves_is_named(message, fault):
    state = State()
    with pytest.raises(StorageMovedError, match=message), stable_storage(state):
        fault(state)


def test_what_is_updated_in_place_and_what_is_transient_is_left_alone():
    state = State()
    with stable_storage(state) as storage:
        state.lengths += 1
        state.tables["keys"][0].fill_(2.0)
        state.scratch = torch.ones(5)
    state.scratch = torch.ones(6)
    storage.check()
    assert storage.names == [".lengths", ".tables['keys'][0]"]


def test_a_tensor_that_is_replaced_twice_cannot_come_back_to_its_address():
    """The allocator hands a freed block to the next tensor of its size."""
    state = State()
    storage = stable_storage(state)
    for _ in range(2):
        state.lengths = state.lengths + 1
    with pytest.raises(StorageMovedError):
        storage.check()


def test_an_exception_of_the_step_is_not_hidden_by_the_guard():
    state = State()

    def fail():
        state.lengths = state.lengths + 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), stable_storage(state):
        fail()


class Callable:
    """An object with a tensor, that can be called."""

    def __init__(self):
        self.total = torch.zeros(2)

    def __call__(self, x):
        self.total = self.total + x

    step = __call__


def closure(owner):
    return lambda x: owner(x)


def changed_tables() -> dict:
    """Owners of every kind, with the path of a tensor and a step that binds it to a new one."""
    norm, one, buffered = nn.BatchNorm1d(2), Callable(), nn.Module()
    buffered.register_buffer("table", torch.zeros(2))
    buffered.scratch = [torch.zeros(2)]  # a tensor that is not registered
    model = nn.Sequential(nn.Linear(2, 2), norm)

    def new_weight():
        model[0].weight = nn.Parameter(torch.zeros(2, 2))

    def new_mean():
        norm.running_mean = torch.zeros(2)

    def new_scratch():
        buffered.scratch[0] = torch.zeros(2)

    return {
        "parameter": (model, ".0.weight", new_weight),
        "buffer": (model, ".1.running_mean", new_mean),
        "module in a container": ({"model": model}, "['model'].1.running_mean", new_mean),
        "attribute of a module": (buffered, ".scratch[0]", new_scratch),
        "callable": (one, ".total", lambda: one(1)),
        "method": (one.step, ".__self__.total", lambda: one(1)),
        "partial": (partial(one, 1), ".func.total", lambda: one(1)),
        "closure": (closure(one), ".owner.total", lambda: one(1)),
        "deque": (deque([one]), "[0].total", lambda: one(1)),
    }


@pytest.mark.parametrize("kind", changed_tables())
def test_owners_of_every_kind_are_watched(kind):
    owner, name, change = changed_tables()[kind]
    with stable_storage(owner) as storage:
        assert name in storage.names
    with pytest.raises(StorageMovedError) as error, stable_storage(owner):
        change()
    assert str(error.value).startswith(f"{name} was replaced by another tensor")


def test_the_tensors_of_a_module_are_those_that_torch_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"norm": nn.BatchNorm1d(2)}))
    expected = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    assert sorted(stable_storage(model).names) == sorted(f".{name}" for name in expected)


@pytest.mark.parametrize("owner", [[], {"a": 1}, nn.ReLU(), object(), len, lambda: 1, State, torch])
def test_an_owner_without_tensors_is_refused(owner):
    with pytest.raises(ValueError, match=r"no tensor can be reached from .*pass the object whose"):
        stable_storage(owner)
