"""`RowStep`: one step of one row, as the host read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class RowStep:
    """One step of one row, as the host read it.

    Args:
        draft_tokens: what was proposed.
        num_accepted: how many of them the sampler accepted.
        new_tokens: what the row emitted: accepted tokens, then one recovered or bonus token, cut at
            its end.
        parents: the token that each one follows, see `Draft.parents`; `None` makes those of a
            chain.
        path: the tokens that were accepted, by their index; `None` makes the first ones.
        outputs: numbers of each new token by name, what the call keeps of them.
        faults: sum of the `Fault` values that were found in the step, 0 for none; `generate` raises
            them.
        num_sound: new tokens before the first fault, as the step was read; `None` for all of them.
    """

    draft_tokens: list[int]
    num_accepted: int
    new_tokens: list[int]
    parents: list[int] | None = None
    path: list[int] | None = None
    outputs: dict[str, list[float]] = field(default_factory=dict)
    faults: int = 0
    num_sound: int | None = None

    def __post_init__(self):
        if self.parents is None:
            object.__setattr__(self, "parents", _of_chain(len(self.draft_tokens)))
        if self.path is None:
            object.__setattr__(self, "path", list(range(self.num_accepted)))

    @property
    def logprobs(self) -> list[float] | Any:
        """With `output_logprobs`, of each new token as it was drawn; else `None`."""
        return self.outputs.get("logprobs")

    @property
    def raw_logprobs(self) -> list[float] | Any:
        """Likewise, by the softmax of the target's own logits."""
        return self.outputs.get("raw_logprobs")

    @property
    def is_chain(self) -> bool:
        """Each draft token follows the one before it."""
        return self.parents == _of_chain(len(self.draft_tokens))

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        from specdec.tree_shape import depths_of

        return max(depths_of(self.parents))

    def children_of(self, node: int) -> list[int]:
        """The draft tokens that follow one, or -1 for the root."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    @property
    def rejected(self) -> list[int]:
        """The draft tokens that follow the last accepted one: where it has any, the emitted token
        stands in their place.
        """
        return self.children_of(self.path[-1] if self.num_accepted else -1)

    @property
    def kinds(self) -> list[str]:
        """`"accepted"`, `"recovered"` or `"bonus"` for each new token."""
        last = "recovered" if self.rejected else "bonus"
        kinds = ["accepted"] * self.num_accepted + [last]
        return kinds[: len(self.new_tokens)]

    def cut(self, count: int) -> None:
        """Drops all but the first new tokens, of a row that ends after them."""
        for values in (self.new_tokens, *self.outputs.values()):
            del values[count:]

    def saved(self) -> list:
        """Its fields for a file, those of a tree only where it is one; `read_step` reads them."""
        fields = [self.draft_tokens, self.num_accepted, self.new_tokens, self.parents, self.path]
        return fields[: 3 if self.is_chain else 5]


def _of_chain(count: int) -> list[int]:
    """`RowStep.parents` of a chain."""
    return list(range(-1, count - 1))
