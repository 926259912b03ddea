"""The checks of arguments: what fits passes as it came, all else is refused by name."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.arguments import (
    check_choice,
    check_device,
    check_integer,
    check_number,
    check_tensor,
    shown,
)
from specdec.paths import check_path

ANYTHING = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.lists(st.integers())
    | st.just(torch.zeros(2))
    | st.just(int)
)


@given(ANYTHING)
def test_an_integer_is_no_boolean_and_a_number_is_finite(value):
    assert len(shown([value] * 1000)) < 100
    is_integer = type(value) is int
    is_number = is_integer or (type(value) is float and math.isfinite(value))
    for check, words, fits, kind_is_wrong in (
        (check_integer, "an integer", is_integer, True),
        (check_number, "a number", is_number, type(value) is not float),
    ):
        if fits:
            assert check("x", value) is value
            continue
        with pytest.raises((TypeError, ValueError)) as caught:
            check("x", value, advice="try y")
        assert caught.type is (TypeError if kind_is_wrong else ValueError)
        assert str(caught.value) == f"x must be {words}, got {shown(value)}; try y"


@given(st.integers(), st.integers(-9, 9), st.integers(-9, 9))
def test_a_range_includes_both_of_its_ends(value, low, high):
    if low <= value <= high:
        assert check_integer("n", value, low, high) == check_number("n", value, low, high) == value
        return
    with pytest.raises(ValueError, match=f"n must be an integer in {low}..{high}, got "):
        check_integer("n", value, low, high)
    with pytest.raises(ValueError, match=f"n must be a number in {low}..{high}, got "):
        check_number("n", value, low, high)
    for end in (low, high, math.nan, math.inf):
        with pytest.raises(ValueError, match="n must be a number"):
            check_number("n", end, above=low, below=high)


@given(ANYTHING)
def test_a_choice_is_one_of_the_values_and_of_its_type(value):
    if value is True or value == "auto":
        assert check_choice("x", value, (True, "auto")) is value
        return
    with pytest.raises(ValueError, match="x must be True or 'auto', got ") as caught:
        check_choice("x", value, (True, "auto"))
    assert str(caught.value).endswith(f"got {shown(value)}")


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


@pytest.mark.parametrize("value", ["gpu", "", None, True, 1.5])
def test_what_names_no_device_is_refused(value):
    with pytest.raises((TypeError, ValueError), match="device must be a torch device such as"):
        check_device("device", value)
    assert check_device("device", "cpu") == torch.device("cpu")


@pytest.mark.parametrize("value", ["", "a\0b", "x" * 5000, 5, None])
def test_what_can_be_no_path_is_refused(value, tmp_path):
    with pytest.raises((TypeError, ValueError), match="output must be the path of a file, got"):
        check_path("output", value, what="a file")
    assert check_path("output", str(tmp_path / "new")) == tmp_path / "new"
