"""`Captured` on a CPU: the same function, with the checks and the reused tensors of a GPU.

The oracle of every value is the function itself, called with inputs of its own.
"""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from architectures import build
from diagonal import PLACES
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.graphs import Captured, no_host_sync
from specdec.graphs.capture import CaptureError, GraphPool
from specdec.graphs.owned import owned_tensors
from specdec.graphs.tree import leaves


@dataclass(frozen=True)
class Pair:
    """A record of tensors."""

    first: Tensor
    second: dict


class Triple(NamedTuple):
    """A named tuple of tensors."""

    x: Tensor
    y: Tensor | None
    count: int


def tree(seed: int, rows: int = 2, count: int = 7, device: str = "cpu"):
    """Tensors in every container there is."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(device)

    return (
        Pair(random(rows, 3), {"a": [random(rows), None], "b": random(rows, 1)}),
        Triple(random(rows, 2), None, count),
    )


def mix(pair: Pair, triple: Triple):
    """A function of all of them, that answers in containers, too."""
    total = pair.first.sum(dim=1) + pair.second["a"][0] * triple.count
    return {"total": total, "rest": Triple(triple.x * pair.second["b"], None, triple.count)}


def values(outputs) -> list:
    return [leaf.tolist() if isinstance(leaf, Tensor) else leaf for _, leaf in leaves(outputs)]


@pytest.mark.parametrize("device", PLACES)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=5), st.integers(0, 3))
def test_a_captured_function_gives_what_the_function_gives(device, seeds, warmup):
    captured = Captured(mix, tree(0, device=device), warmup=warmup)
    for seed in seeds:
        inputs = tree(seed, device=device)
        with no_host_sync():
            outputs = captured(*inputs)
        assert values(outputs) == values(mix(*inputs))
    assert captured.num_calls == len(seeds)


def test_outputs_are_the_same_tensors_in_every_call_and_inputs_are_copied():
    captured = Captured(mix, tree(0))
    inputs = tree(1)
    first = captured(*inputs)
    kept = values(first)
    inputs[0].first.fill_(torch.nan)  # the caller's own
    assert values(first) == kept
    second = captured(*tree(2))
    assert second is first is captured.outputs
    assert values(first) == values(mix(*tree(2))) != kept


def test_a_tensor_that_is_given_twice_is_two_inputs():
    x = torch.zeros(2)
    captured = Captured(torch.sub, (x, x))
    assert captured(torch.tensor([5.0, 7.0]), torch.tensor([1.0, 2.0])).tolist() == [4.0, 5.0]


def test_warm_up_calls_are_real_ones_and_pool_run_stands_for_them():
    total = torch.zeros(())

    def add(x):
        total.add_(x)
        return total * 1

    captured = Captured(add, (torch.ones(()),), warmup=2)
    assert (float(total), captured.num_calls) == (2.0, 0)
    assert float(captured(torch.tensor(5.0))) == 7.0
    pool = GraphPool("cpu")
    assert float(pool.run(lambda: add(torch.tensor(1.0)))) == 8.0
    assert float(Captured(add, (torch.ones(()),), pool=pool, warmup=0)(torch.ones(()))) == 9.0


CHANGED = [
    (r"\[1\]\.x.*\[2, 2\]", lambda a, b: (a, b._replace(x=torch.zeros(1, 2)))),
    ("float32.*float64", lambda a, b: (a, b._replace(x=b.x.double()))),
    (r"\[1\]\.y.*None.*float32", lambda a, b: (a, b._replace(y=b.x))),
    ("captured with 7.*with 8.*host", lambda a, b: (a, b._replace(count=8))),
    ("on cpu.*on meta", lambda a, b: (a, b._replace(x=torch.empty(2, 2, device="meta")))),
    (
        r"missing \[\"\[0\]\.second\['b'\]\"\]",
        lambda a, b: (Pair(a.first, {"a": a.second["a"]}), b),
    ),
    (
        "not expected",
        lambda a, b: (Pair(a.first, a.second | {"a": [torch.zeros(2), None, 1]}), b),
    ),
    ("missing", lambda a, b: (a,)),
]


@pytest.mark.parametrize(("words", "change"), CHANGED)
def test_other_inputs_than_captured_are_refused_and_nothing_is_computed(words, change):
    captured = Captured(mix, tree(0))
    outputs = values(captured(*tree(1)))
    with pytest.raises(ValueError, match=words):
        captured(*change(*tree(2)))
    assert values(captured.outputs) == outputs
    assert captured.num_calls == 1
    assert values(captured(*tree(3))) == values(mix(*tree(3)))


def test_a_function_whose_outputs_change_their_shape_is_found_on_a_cpu():
    sizes = iter([2, 2, 3])
    captured = Captured(lambda x: x.new_zeros(next(sizes)), (torch.zeros(1),), warmup=0)
    captured(torch.zeros(1))
    captured(torch.zeros(1))
    with pytest.raises(ValueError, match=r"output itself: captured with float32 \[2\].*\[3\]"):
        captured(torch.zeros(1))


def test_a_function_that_waits_for_the_device_is_refused_by_operation_and_line():
    def waits(x):
        return x * int(x.sum())  # the guilty line

    with pytest.raises(CaptureError, match=r"_local_scalar_dense|item") as error:
        Captured(waits, (torch.ones(2),))
    assert "test_capture.py" in str(error.value)
    assert "the guilty line" in str(error.value)
    assert "on the device" in str(error.value)
    with pytest.raises(CaptureError, match="the guilty line"):
        GraphPool("cpu").run(lambda: waits(torch.ones(2)), is_guarded=True)


WAITING = {
    "item": lambda x: x * x.sum().item(),
    "float": lambda x: x * float(x[0]),
    "if": lambda x: x if x[0] else -x,
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "tolist": lambda x: x * x.tolist()[0],
    "numpy": lambda x: x * x.numpy()[0],
    "unique": lambda x: x.unique(),
}


def test_what_a_model_of_hugging_face_reads_is_refused_with_the_form_that_works():
    model, ids = build("llama"), torch.ones(2, 9, dtype=torch.long)
    mask = torch.ones_like(ids)
    with pytest.raises(CaptureError, match=r"masking_utils.*four dimensions.*graphs/README\.md"):
        Captured(lambda ids: model(ids, attention_mask=mask).logits, (ids,))
    mask = torch.full((9, 9), torch.finfo(model.dtype).min).triu(1)[None, None]
    options = {"attention_mask": mask, "use_cache": False}
    captured = Captured(lambda ids: model(ids, **options).logits, (ids,), check=True)
    assert captured(ids).equal(model(ids).logits)


@pytest.mark.parametrize("name", WAITING)
def test_without_warm_up_the_first_call_is_guarded(name):
    captured = Captured(WAITING[name], (torch.ones(2),), warmup=0)
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"cannot be captured.*test_capture\.py"):
            captured(torch.ones(2))
    assert captured.outputs is None


def test_a_guard_that_is_not_wanted_is_left_out():
    for warmup in (0, 2):
        options = {"warmup": warmup, "is_guarded": False}
        captured = Captured(WAITING["item"], (torch.ones(2),), **options)
        assert captured(torch.ones(2)).tolist() == [2.0, 2.0]


class Counting:
    """Sound where it counts in a tensor; it may count on the host, or in a tensor that it makes."""

    def __init__(self, kind="sound"):
        self.kind, self.count, self.calls = kind, torch.zeros(()), 0

    def __call__(self, x):
        """Its sums depend on how often it was called."""
        self.calls += 1
        if self.kind == "rebinds":
            self.count = self.count + 1
        else:
            self.count.add_(1)
        scale = self.calls if self.kind == "host" else self.count
        return {"scaled": x * scale, "x": x + 0}


TOTAL = torch.zeros(2)


def adds_to_a_global(x):
    return TOTAL.add_(x) * 1


def changes_its_input(x):
    return x.add_(1) * 2


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("kind", ["object", "method", "closure", "global", "input", "module"])
def test_a_check_leaves_every_state_as_one_call_does(kind, warmup):
    """Each call is made twice, and what it changed in between is taken back."""

    def made():
        counting, norm = Counting(), torch.nn.BatchNorm1d(2).train()
        TOTAL.zero_()
        return {
            "object": counting,
            "method": counting.__call__,
            "closure": lambda x: counting(x),
            "global": adds_to_a_global,
            "input": changes_its_input,
            "module": norm,
        }[kind]

    x, texts = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)), []
    x = x if kind != "global" else x[0]
    for check in (False, True):
        captured = Captured(made(), (x,), warmup=warmup, check=check)
        texts.append([values(captured(x * i)) for i in range(3)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("kind", "named"),
    [("host", r"^output \['scaled'\]: 6 of 6 numbers"), ("rebinds", "^count: 1 of")],
)
def test_a_check_names_what_differs(kind, named):
    captured = Captured(Counting(kind), (torch.ones(3, 2),), check=True)
    with pytest.raises(CaptureError, match=named):
        captured(torch.ones(3, 2))


@pytest.mark.parametrize("device", PLACES)
def test_a_weight_that_is_changed_in_place_is_read_as_it_is(device):
    """Also between a replay and the check of the next one."""
    layer = torch.nn.Linear(2, 2, bias=False).to(device)
    x, weight = torch.ones(1, 2, device=device), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    captured = Captured(layer, (x,), check=True)
    for factor in (1.0, 2.0, -3.0):
        with torch.no_grad():
            layer.weight.copy_(weight * factor)
        assert captured(x).tolist() == [[3.0 * factor, 7.0 * factor]]


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("made", ["closure", "module"])
def test_a_check_of_a_function_that_changes_a_parameter_is_refused(made, device):
    """A check cannot take it back: it would be changed twice in each call."""

    class Training(torch.nn.Linear):
        def forward(self, x):
            self.weight.sub_(0.5)
            return super().forward(x)

    layer, x = Training(2, 2).to(device), torch.ones(1, 2, device=device)
    function = layer if made == "module" else lambda x: layer(x)
    with pytest.raises(CaptureError, match=r"changes the parameter .*weight in place.*a buffer"):
        Captured(function, (x,), warmup=0, check=True)(x)
    before = layer.weight.clone()
    Captured(function, (x,), warmup=0)(x)
    assert layer.weight.equal(before - 0.5)


@pytest.mark.parametrize("warmup", [0, 1])
def test_linear_algebra_that_waits_is_refused_and_its_kin_is_not(warmup):
    matrix = torch.eye(3) * 2
    for waits in (torch.linalg.inv, torch.linalg.svdvals):
        with pytest.raises(CaptureError, match=r"cannot be captured.*makes the host wait"):
            Captured(waits, (matrix,), warmup=warmup)(matrix)
    found = Captured(torch.linalg.inv_ex, (matrix,), warmup=warmup)(matrix)
    assert found.inverse.equal(torch.eye(3) / 2)


def test_a_check_compares_bits():
    draws = Captured(lambda x: x + torch.rand(2), (torch.zeros(2),), check=True)
    with pytest.raises(CaptureError, match=r"^output: . of 2 numbers.*torch's generators"):
        draws(torch.zeros(2))
    signs = iter([0.0, -0.0])
    negative = Captured(lambda x: x * next(signs), (torch.ones(2),), warmup=0, check=True)
    with pytest.raises(CaptureError, match=r"^output: 2 of 2 .*0\.0 and -0\.0"):
        negative(torch.ones(2))
    for dtype in (torch.bool, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int8):
        x = torch.ones(3, 2).to(dtype)
        same = Captured(lambda x: (x.t(), x[0], x[:0]), (x,), check=True)
        assert same(x)[0].dtype == dtype
    nan = torch.tensor([torch.nan, 1.0])
    assert Captured(lambda x: x + 1, (nan,), check=True)(nan)[1] == 2


def test_a_function_without_tensors_among_its_inputs_needs_a_device():
    with pytest.raises(ValueError, match="pass device="):
        Captured(lambda: torch.zeros(1), ())
    assert Captured(lambda: torch.ones(1), device="cpu")().tolist() == [1.0]


def test_a_captured_call_runs_under_every_mode_of_autograd():
    weight = torch.ones(2, requires_grad=True)
    captured = Captured(lambda x: x * weight, (torch.ones(2),))
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            assert captured(torch.tensor([2.0, 3.0])).tolist() == [2.0, 3.0]


def test_owned_tensors_are_found_through_objects_and_cycles_and_once():
    class Owner:
        transient_attributes = ("scratch",)

        def __init__(self):
            self.own, self.scratch = torch.ones(1), torch.zeros(1)
            self.parts = [tree(0), {"me": self}]

    owner = Owner()
    found = owned_tensors(owner)
    assert found[".own"] is owner.own
    assert ".parts[0][0].second['a'][0]" in found
    assert not any("scratch" in name for name in found)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"example_inputs": torch.zeros(2)}, r"example_inputs.*\(x,\)"),
        ({"warmup": 1.5}, "warmup"),
        ({"warmup": -1}, "warmup"),
        ({"device": "nope"}, "device"),
    ],
)
def test_what_a_capture_is_given_is_checked(options, named):
    with pytest.raises((TypeError, ValueError), match=named):
        Captured(torch.neg, **({"example_inputs": (torch.zeros(2),)} | options))
