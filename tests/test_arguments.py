"""The checks of arguments: what fits passes as it came, all else is refused in the same words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.arguments import (
    check_device,
    check_fields,
    check_folder,
    check_integer,
    check_number,
    check_options,
    check_tensor,
    check_type,
    shown,
)

HINTS = {
    bool: (st.booleans(), "True or False"),
    int: (st.integers(), "an integer"),
    float: (st.floats() | st.integers(), "a number"),
    str: (st.text(), "a string"),
    int | None: (st.integers() | st.none(), "an integer or None"),
    Literal["a", "b"]: (st.sampled_from(["a", "b"]), "'a' or 'b'"),
    Literal["a", "b"] | None: (st.sampled_from(["a", "b", None]), "'a', 'b' or None"),
    tuple[int, ...]: (
        st.lists(st.integers()).map(tuple),
        "a tuple whose items are each an integer",
    ),
    Sequence[str]: (st.lists(st.text()), "a sequence whose items are each a string"),
    torch.Tensor: (st.just(torch.zeros(2)), "a Tensor"),
    Callable: (st.just(len), "a function"),
}
ANYTHING = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.lists(st.integers() | st.text())
    | st.just(torch.zeros(2))
    | st.just(int)
)


@pytest.mark.parametrize("hint", HINTS, ids=str)
@given(st.data())
def test_what_fits_passes_as_it_came(hint, data):
    value = data.draw(HINTS[hint][0])
    assert check_type("x", value, hint) is value


@pytest.mark.parametrize("hint", [bool, int, str, tuple[int, ...], Literal["a", "b"]], ids=str)
@given(ANYTHING)
def test_what_does_not_fit_is_refused_in_the_words_of_the_hint(hint, value):
    kinds = {bool: bool, int: int, str: str, tuple[int, ...]: tuple}
    own = type(value) is kinds.get(hint) or (hint is Literal["a", "b"] and value in ("a", "b"))
    if own:
        assert check_type("x", value, hint) is value
        return
    with pytest.raises((TypeError, ValueError)) as caught:
        check_type("x", value, hint, advice="try y")
    assert str(caught.value) == f"x must be {HINTS[hint][1]}, got {shown(value)}; try y"


def test_a_name_that_does_not_exist_is_a_value_and_another_type_is_not():
    with pytest.raises(ValueError, match="x must be 'a' or 'b', got 'c'"):
        check_type("x", "c", Literal["a", "b"])
    with pytest.raises(TypeError, match="x must be 'a' or 'b', got 3"):
        check_type("x", 3, Literal["a", "b"])


@given(st.integers(), st.integers(-9, 9), st.integers(-9, 9))
def test_a_range_includes_both_of_its_ends(value, low, high):
    if low <= value <= high:
        assert check_integer("n", value, low, high) == check_number("n", value, low, high) == value
        return
    with pytest.raises(ValueError, match=f"n must be an integer in {low}..{high}, got "):
        check_integer("n", value, low, high)
    with pytest.raises(ValueError, match=f"n must be a number in {low}..{high}, got "):
        check_number("n", value, low, high)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0, -1.5])
def test_a_number_that_must_be_positive_and_finite(value):
    with pytest.raises(ValueError, match="t must be a number"):
        check_number("t", value, above=0)
    assert check_number("t", 1e-300, above=0) == 1e-300


@dataclass(frozen=True)
class Flags:
    """A record as configurations are."""

    has_bias: bool
    mode: Literal["sum", "mean"]
    layers: tuple[int | str, ...] = ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("false", "sum"), "Flags.has_bias must be True or False, got 'false'"),
        ((1, "sum"), "Flags.has_bias must be True or False, got 1"),
        ((True, "max"), "Flags.mode must be 'sum' or 'mean', got 'max'"),
        ((True, "sum", [1]), "Flags.layers must be a tuple"),
        ((True, "sum", (1.5,)), "Flags.layers must be a tuple"),
    ],
)
def test_every_field_of_a_record_is_held_to_its_hint(values, message):
    check_fields(Flags(True, "mean", (1, "final")))
    with pytest.raises((TypeError, ValueError), match=message):
        check_fields(Flags(*values))


def test_options_without_a_hint_are_left_to_the_caller():
    check_options({"other": object()}, {"known": int})
    with pytest.raises(TypeError, match="known must be an integer"):
        check_options({"known": "1"}, {"known": int})


def test_a_tensor_is_held_to_shape_data_type_and_device():
    x = torch.zeros(2, 3)
    assert check_tensor("x", x, (2, None), (torch.float32,), device=x.device) is x
    for value, message in (
        ([[0.0]], r"x must be a tensor, got \[\[0.0\]\]"),
        (x[0], r"x must have shape \[2, any\], got \[3\]"),
        (x.T, r"x must have shape \[2, any\], got \[3, 2\]"),
        (x.double(), "x must be float32, got float64"),
        (x.to("meta"), "x must be on cpu, got a tensor on meta"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            check_tensor("x", value, (2, None), (torch.float32,), device=torch.device("cpu"))


@pytest.mark.parametrize("value", ["gpu", "tpu9", "", None, True, 1.5])
def test_what_names_no_device_is_refused(value):
    with pytest.raises((TypeError, ValueError), match="device must be a torch device such as"):
        check_device("device", value)
    assert check_device("device", "cpu") == torch.device("cpu")


def test_a_folder_is_no_file_and_has_a_name(tmp_path):
    (tmp_path / "file").write_text("x")
    assert check_folder("folder", str(tmp_path / "new")) == tmp_path / "new"
    for value in (tmp_path / "file", tmp_path / "file" / "below", "", "a\0b", 5, None):
        with pytest.raises((TypeError, ValueError), match="folder must be"):
            check_folder("folder", value)
    assert not (tmp_path / "new").exists()


def test_what_is_shown_is_short_and_holds_no_tensor():
    assert len(shown("x" * 10**6)) < 100
    assert shown([torch.zeros(9)]) == "a list"
    assert shown({"a": (torch.nn.Linear(2, 2),)}) == "a dict"
