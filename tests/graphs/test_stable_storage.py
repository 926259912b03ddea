"""`stable_storage` names every tensor that a step moved, and no other."""

import pytest
import torch

from specdec.graphs import StorageMovedError, stable_storage


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
