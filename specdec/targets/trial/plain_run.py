"""The plain run of the self-test: what a model's own forward makes of two texts, how far that moves
by rounding, and how far it is from the windowed run and from other runs by HF's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.hf.foreign import foreign_attention
from specdec.targets.route import Route
from specdec.targets.trial.layer_trace import ARRIVED, LayerTrace
from specdec.targets.trial.rounding import (
    FINE_NOISE_FACTOR,
    MOST_ROUNDING,
    NOISE_FACTOR,
    STEPS_FACTOR,
    Difference,
    Differences,
    distance,
    unit_of,
)
from specdec.targets.trial.witness import (
    PlainForwardError,
    generated,
    read_in_batches,
    read_in_steps,
    read_padded,
    read_whole,
)
from specdec.targets.wrappers import remark_on_hooks

FEW_TOKENS = 16
"""Of a text that is read in batches of several sizes, or gone on with by HF's `generate`."""


class PlainRun:
    """HF's plain forward of two texts, and how far each state of it moves by rounding: where the
    inputs of its layer are rounded once more to the coarsest data type of the model's, and at least
    by one rounding to its own.

    Args:
        model, route, tokens: of the self-test.
        trace: of a view of the model.
        read: runs that view over the tokens, and returns logits; `None` for a forward of HF's.
        name: of what it does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        route: Route,
        tokens: Tensor,
        trace: LayerTrace,
        read: Callable[[], Tensor] | None = None,
        name: str = "its plain forward",
    ):
        self._model, self._route, self._tokens, self._name = model, route, tokens, name
        self.trace, self._read = trace, read or (lambda: read_whole(trace.view, tokens))
        self.states = self.trace.run(self._read)
        self.inputs = {n: state for n, state in self.states.items() if n.startswith(ARRIVED)}
        dtypes = {model.dtype, *(self.states[name].dtype for name in route.compared_modules)}
        units = (torch.finfo(dtype).eps for dtype in dtypes)  # autocast rounds more
        self._unit = max(*units, *map(unit_of, self.states.values()))
        self._factor = NOISE_FACTOR if self._unit > 1e-5 else FINE_NOISE_FACTOR
        self._generator = torch.Generator().manual_seed(0)
        self._whole = None if read else read_whole(model, tokens)
        if self._whole is not None and self._whole.isnan().any():
            own = foreign_attention(model)
            own = f"; its attention function {own} is none of transformers'" if own else ""
            raise PlainForwardError(
                f"{type(model).__name__} cannot be decoded: its own forward has logits that are no "
                f"numbers (NaN) for a text of {tokens.shape[1]} tokens; look at its weights, or "
                f"load it in another data type than {model.dtype}{own}{remark_on_hooks(model)}"
            )
        noisy = {name: self._rounded(x) for name, x in self.inputs.items()}
        self.rounding = self._moved(lambda name, arrived: noisy[name], MOST_ROUNDING[0])

    def _rounded(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self._generator, dtype=torch.float64, device="cpu")
        return (x * (1 + self._unit * noise.to(x.device))).to(x.dtype)

    def _moved(self, given: Callable[[str, Tensor], Tensor], most: float) -> dict[str, Tensor]:
        """How far states move where layers are given this; at most so many roundings of each."""
        moved, found = self.trace.run(self._read, given), {}
        for name, state in self.states.items():
            size = distance(state, torch.zeros_like(state))
            error = distance(moved[name], state).minimum(most * self._unit * size)
            found[name] = error.maximum(unit_of(state) * size)
        return found

    def difference(
        self, slots: Tensor, ours: dict[str, Tensor], rows: Tensor | None = None
    ) -> Differences:
        """How far states of the tokens at slots `[B, N]` are from these; row i has the text `rows`
        `[B]` says, its own where that is `None`.
        """
        found = {
            name: distance(x, take(self.states[name], slots, rows)) for name, x in ours.items()
        }
        return {
            f"{name} differs from {self._name}": Difference(
                error, self._factor * take(self.rounding[name], slots, rows)
            )
            for name, error in found.items()
        }

    def against_hf(self) -> Iterator[Differences]:
        """How far the logits of the model itself are from these, over the whole text and in steps:
        both by HF's code alone.
        """
        own, whole = self.states["the logits"], self._whole
        allowed = self._factor * self.rounding["the logits"]
        yield {
            "the logits of the model itself and those of a view of it differ": Difference(
                distance(whole, own), allowed
            )
        }
        moved = self._moved(lambda name, x: self._rounded(x), MOST_ROUNDING[1])["the logits"]
        allowed = (STEPS_FACTOR if self._route.mixers else self._factor) * moved
        # HF hands a mask to attention functions of its own alone.
        is_usual = not self._route.mixers and not foreign_attention(self._model)
        steps = read_in_steps(self._model, self._tokens, in_pieces=is_usual)
        if steps is not None:
            name = "a text read token by token, with HF's own cache, has logits that differ"
            yield {name: Difference(distance(steps, whole), allowed)}
        if self._route.num_tried:
            yield from self._beside_others(allowed)
            if is_usual:
                yield from self._behind_padding(allowed)

    def _beside_others(self, allowed: Tensor) -> Iterator[Differences]:
        """The same of batches of other sizes, and of what the model's own `generate` writes."""
        few = slice(0, FEW_TOKENS)
        for rows, logits in read_in_batches(self._model, self._tokens[:, few]):
            found = Difference(distance(logits, self._whole[rows, few]), allowed[rows, few])
            yield {f"in a batch of {len(rows)} a text has logits that differ": found}
        if (own := generated(self._model, self._tokens[:, few])) is not None:
            text, logits = own
            whole = read_whole(self._model, text)[:, -logits.shape[1] - 1 : -1]
            found = distance(logits, whole)
            most = allowed.amax().expand_as(found)
            yield {"its own `generate` has logits that differ": Difference(found, most)}

    def _behind_padding(self, allowed: Tensor) -> Iterator[Differences]:
        few = slice(0, FEW_TOKENS)
        padded = read_padded(self._model, self._tokens[:, few])
        if padded is not None:
            begun = slice(0, padded.shape[1])
            found = distance(padded, self._whole[1:, begun])
            name = "behind padding a text has logits that differ"
            yield {name: Difference(found, allowed[1:, begun])}


def take(state: Tensor, slots: Tensor, texts: Tensor | None = None) -> Tensor:
    """`[B, N, ...]`, the tokens at slots `[B, N]` of a state `[2, T, ...]`: of its rows in order,
    or of these.
    """
    rows = torch.arange(2, device=slots.device) if texts is None else texts
    rows = rows.to(state.device)[:, None]
    return state[rows, slots.to(state.device)]
