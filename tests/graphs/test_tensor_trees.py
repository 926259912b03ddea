"""What happens to a batch is a function of its tree: every table alike, and nothing else."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.graphs.tree import (
    copy_into,
    fill,
    keep_rows,
    map_tensors,
    rows_to_keep,
    shared,
    size_bytes,
    tables,
)
from specdec.samplers import LogitsFilter

WIDTH = 3


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


@dataclass
class Text:
    """With a view of its own, and with what is the same for all."""

    ids: Tensor
    angles: Tensor = shared()
    name: str = "text"

    def __post_init__(self):
        self.last = self.ids[:, -1]


def tree_of(rows):
    """Numbers that tell rows, columns and tables apart."""
    tables = torch.arange(4 * rows * WIDTH).view(4, rows, WIDTH)
    text = Text(tables[0].clone(), torch.arange(rows), name="kept")
    return {"text": text, "pairs": [Pair(tables[1].clone(), None)], "rest": (tables[2].clone(), 7)}


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_kept_rows_are_those_of_every_table_in_its_storage_and_nothing_else_changes(is_live):
    count, rows = len(is_live), rows_to_keep(is_live)
    tree, expected = tree_of(count), tree_of(count)
    kept = keep_rows(tree, rows)
    assert list(tables(kept)) == ["['text'].ids", "['pairs'][0].first", "['rest'][0]"]
    for path, table in tables(kept).items():
        assert table.equal(tables(expected)[path][rows])
        assert table.data_ptr() == tables(tree)[path].data_ptr() or not rows
    text = kept["text"]
    assert type(kept["pairs"][0]) is Pair
    assert (text.name, kept["rest"][1]) == ("kept", 7)
    assert text.angles is tree["text"].angles
    assert text.last.equal(text.ids[:, -1])  # a view of the rows that are left
    fill(kept, 5)
    assert all((table == 5).all() for table in tables(kept).values())
    assert text.angles.equal(torch.arange(count))
    assert (text.last == 5).all()


def test_a_tree_is_copied_into_another_one_of_its_structure_or_not_at_all():
    tree, other = tree_of(2), map_tensors(lambda table: table + 1, tree_of(2))
    found = {path: table.data_ptr() for path, table in tables(tree).items()}
    copy_into(tree, other)
    for path, table in tables(tree).items():
        assert table.equal(tables(other)[path])
        assert table.data_ptr() == found[path]
    for wrong in ({"a": torch.ones(2), "n": 3}, {"a": torch.ones(1), "n": 2}, {"a": None, "n": 2}):
        mine = {"a": torch.zeros(2), "n": 2}
        with pytest.raises(ValueError, match="cannot take over"):
            copy_into(mine, wrong)
        assert mine["a"].eq(0).all()
    with pytest.raises(ValueError, match=r"_greedy is None and cannot take over a tensor \[2\]"):
        copy_into(LogitsFilter(2), LogitsFilter(2, temperature=[0.0, 1.0]))


def test_a_tensor_without_data_is_not_copied():
    mine = {"a": torch.ones(2), "b": torch.ones(2)}
    copy_into(mine, {"a": torch.empty(2, device="meta"), "b": torch.zeros(2)})
    assert (mine["a"].tolist(), mine["b"].tolist()) == ([1, 1], [0, 0])


def test_storage_counts_once_however_many_tensors_share_it():
    store = torch.zeros(4, 8)
    assert size_bytes({"store": store, "views": [store[:2], store.T], "own": store + 1}) == 2 * 128
