"""The self-test: an HF model is accepted only if windows over a cache of garbage reproduce its own
plain forward.

An architecture may apply masks, biases and positions anywhere, and so may a user's hooks. So a
model is run by HF's own code over whole texts, and in ragged windows, and compared layer by layer
and token by token: what goes into each decoder layer, what its attention returns, and what it
returns. In the windowed run each layer is given what it was given in the plain run. A difference is
then of that layer, and rounding does not accumulate over layers until it hides a wrong mask in one
of them. HF's own steps over the same texts are compared first (witness.py).

The yardstick is the data type: how far a part moves when its input is rounded once more. No other
implementation of the model is compared with, since that one need not be the same function.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.graphs.tree import fill
from specdec.hf.foreign import foreign_attention
from specdec.hf.positions import position_limit
from specdec.targets.cache import Chunk, KeyValueShape, SlotCache, memory_bytes, narrowed
from specdec.targets.edits.blocks import BLOCK
from specdec.targets.edits.edit import Edit, name_of
from specdec.targets.edits.indexed import FEW, choosing_few
from specdec.targets.edits.pooled import pool_size
from specdec.targets.edits.streams import Streams
from specdec.targets.features import decoder_layers
from specdec.targets.route import Route
from specdec.targets.view import wrap_forward
from specdec.targets.views import forward, open_view, open_views, open_window
from specdec.targets.witness import (
    NUM_ROWS,
    PlainForwardError,
    generated,
    read_in_batches,
    read_in_steps,
    read_padded,
    read_whole,
    trial_texts,
)
from specdec.targets.wrappers import remark_on_hooks

NOISE_FACTOR, FINE_NOISE_FACTOR = 8.0, 32.0
"""A state may differ by so many times its rounding, in half precision and in float32. Of 45
architectures none differed by more than 1.0 and 3.8 times; MPT, with biases of 2 000 keys, 17."""
MOST_ROUNDING = 64.0, 512.0
"""A layer enlarges one rounding of its input by so much at most, and all layers of a model one of
each of their inputs. Seen were 10 in attention layers, 53 in recurrent ones, 146 in all layers.
What moves by more does not move by rounding."""
STEPS_FACTOR = 100.0
"""HF's steps through recurrent layers sum exponents in another order than its forwards of a whole
text; up to 15 times the rounding of their inputs was seen."""
LONGEST_WINDOW = 64
"""Sliding windows and chunks of up to so many tokens are exceeded by the texts of the trial."""
WIDTH = 4096
"""Slots that the trial attends over, unless the model has fewer positions or a longer window."""
FEW_TOKENS = 16
"""Of a text that is read in batches of several sizes, or gone on with by HF's `generate`."""
NUM_EDITED = 64
"""Tokens of a text that edits are tried over; halves of it are windows."""
NUM_TEXTS = 8
"""Texts that are tried where rounding may choose other experts for a token."""


class Difference(NamedTuple):
    """Of a state of some tokens, `[B, N]` each (of a window two rows): how far it is from the plain
    run's, in rms over channels, and how far it may be.
    """

    found: Tensor
    allowed: Tensor

    @property
    def excess(self) -> Tensor:
        """Above 1 where it cannot be rounding, as NaN cannot."""
        ratio = self.found / self.allowed
        return torch.where(self.found == 0, 0.0, ratio.nan_to_num(torch.inf)).cpu()


Differences = Mapping[str, Difference]


def compare(model: PreTrainedModel, route: Route) -> tuple[str | None, Route]:
    """What is wrong if ragged windows over a cache of garbage differ from a plain forward, `None`
    if nothing is.

    Args:
        model: without wrappers.
        route: to be tried.

    Returns:
        The complaint about windows of chains, and the route with what was seen on the way: what is
        wrong with the window of a tree, and what decoder layers return.

    Raises:
        PlainForwardError: HF's own forward depends on how a text is cut into calls.
    """
    complaint, route = _compared(model, route)
    is_choosing = route.is_indexed or route.compressors
    few = choosing_few(model) if is_choosing and complaint is None else None
    if few is not None:  # a short text has no more keys than its indexers choose
        fault = route.fault_of_trees
        complaint, route = _compared(few, route)
        route = replace(route, fault_of_trees=fault or route.fault_of_trees)
    return complaint, route


def _compared(model: PreTrainedModel, route: Route) -> tuple[str | None, Route]:
    """`compare` of a model as it is."""
    of_plain, of_chains, of_trees = _Judge(), _Judge(), _Judge()
    for number in range(NUM_TEXTS if _may_flip(model) else 1):
        trial = _Trial(model, route, number)
        cut, complaint = of_plain(trial.plain.against_hf()), of_chains(trial.chains())
        is_serial = route.mixers or route.compressors
        fault = None if is_serial else of_trees.of_anything(trial.tree)
        if not (cut or complaint or fault):
            break
    if cut:
        raise PlainForwardError(
            f"{type(model).__name__} cannot be decoded in windows ({cut}): its own forward depends "
            "on how a text is cut into calls, or on something beside the text"
            f"{remark_on_hooks(model)}. Use HF generate for this model"
        )
    fault = "recurrent layers read it as a chain" if route.mixers else fault
    fault = "compressed layers read it as a chain" if route.compressors else fault
    trace, inputs = trial.plain.trace, trial.plain.inputs.values()
    seen = {"returns_tuples": trace.has_tuples, "has_streams": any(x.dim() > 3 for x in inputs)}
    return complaint, replace(route, fault_of_trees=fault, **seen)


def _may_flip(model: PreTrainedModel) -> bool:
    """Whether rounding may choose other experts, or keys, for a token: where scores are coarse."""
    is_coarse = torch.finfo(model.dtype).eps > 1e-5
    names = (name for name, _ in model.named_modules())
    return is_coarse and any("expert" in name or "indexer" in name for name in names)


def try_edits(model: PreTrainedModel, route: Route, edits: Sequence[Edit]) -> None:
    """Raises `ValueError` if what edits of the user do depends on how a text is cut into windows,
    on the rows of a batch, or fails: windows of several sizes are held against one window over the
    whole text, with the same edits in both. What the model is without them was tried before.
    """
    of_windows, of_trees, complaint = _Judge(), _Judge(), None
    names, what = ", ".join(map(name_of, edits)), type(model).__name__
    open_view(model, route, edits=edits)  # so that their own errors come as they are
    with torch.inference_mode(route.is_compiled), torch.no_grad():
        for number in range(NUM_TEXTS if _may_flip(model) else 1):
            try:
                trial = _Trial(model, route, number, edits)
                complaint = of_windows(chain(trial.chains(), trial.batches()))
                if route.fault_of_trees is None:
                    complaint = complaint or of_trees(iter([trial.tree()]))
            except Exception as error:
                raise ValueError(
                    f"edits of {what} ({names}) fail in a window of their trial "
                    f"({type(error).__name__}: {error}); a window has any number of tokens and "
                    "rows, and row_inputs of a call's own may be missing"
                ) from error
            if complaint is None:
                return
    raise ValueError(
        f"edits of {what} ({names}) depend on how a text is cut into windows ({complaint}). Let "
        "them act by the positions of tokens, window_of(view).since_prompt or .text_positions, not "
        "by their places in a window, the number of a window's tokens or rows, or what was "
        "computed before: see 'Interventions' in docs/models.md"
    )


class _Judge:
    """Says what is different in all texts so far, at the same place of the same window.

    Where there are experts, one token of one text may get another one by rounding. What is wrong,
    or depends on the place in a call, differs in every text.
    """

    def __init__(self):
        self._least: dict[tuple[int, str], Tensor] = {}

    def __call__(self, windows: Iterator[Differences]) -> str | None:
        """The complaint with the windows of another text."""
        complaint = None
        for index, differences in enumerate(windows):
            for name, difference in differences.items():
                excess = difference.excess
                excess = torch.minimum(excess, self._least.get((index, name), excess))
                self._least[index, name] = excess
                if complaint is None and bool((excess > 1).any()):
                    place = divmod(int(excess.argmax()), excess.shape[1])
                    found, allowed = (float(x[place]) for x in difference)
                    complaint = f"{name} by {found:.3g} in rms, where rounding is {allowed:.3g}"
        return complaint

    def of_anything(self, window: Callable[[], Differences]) -> str | None:
        """The same of one window; whatever a foreign model raises is a complaint, too."""
        try:
            return self(iter([window()]))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


class _Trace:
    """What goes through the decoder layers and the compared modules of a private view in a forward,
    each `[2, N, ...]`, in the order of the forward. Decoder layers are given what `given` makes of
    the name of their input and of what arrives.
    """

    def __init__(self, view: PreTrainedModel, route: Route):
        self.view, self._streams = view, Streams.of(view)
        self.has_tuples = False
        self._given: Callable[[str, Tensor], Tensor] = lambda name, arrived: arrived
        self._seen: dict[str, Tensor] = {}
        self._num_runs = Counter[int]()  # of each layer in a forward; some run in loops
        layers = decoder_layers(view)[1]
        for i, layer in enumerate(layers):
            wrap_forward(layer, partial(self._run_layer, i))
        for name in route.compared_modules:
            wrap_forward(view.get_submodule(name), partial(self._watch, name))

    def run(
        self, read: Callable[[], Tensor], given: Callable[[str, Tensor], Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Everything to compare.

        Args:
            read: makes a forward of the view and returns its logits.
            given: `None` leaves what arrives.
        """
        self._given, self._seen = given or (lambda name, arrived: arrived), {}
        self._num_runs.clear()
        states = self._seen | {"the logits": read()}
        if len(states) == 1:
            raise ValueError("a forward of its view runs none of the view's layers")
        return states

    def _run_layer(self, index: int, forward: Callable, *args, **kwargs):
        arrived = args[0] if args else kwargs["hidden_states"]
        run = self._num_runs[index]
        self._num_runs[index] += 1
        of_run = f" in run {run + 1}" if run else ""
        name = f"{_ARRIVED} layer {index}{of_run}"
        streams = self._streams
        self._seen[name] = state = self._copied(arrived)  # hooks may write into what they get
        given = self._given(name, state)
        given = (given if streams is None else streams.as_layers_have_them(given)).clone()
        if args:
            args = (given, *args[1:])
        else:
            kwargs["hidden_states"] = given
        out = forward(*args, **kwargs)
        state = out if isinstance(out, Tensor) else out[0]
        self._seen[f"layer {index}{of_run}"] = self._copied(state)
        self.has_tuples |= not isinstance(out, Tensor)
        return out

    def _copied(self, state: Tensor) -> Tensor:
        """`[2, N, ...]`, what a layer gets or returns."""
        return (state if self._streams is None else self._streams.rows_first(state)).clone()

    def _watch(self, name: str, forward: Callable, *args, **kwargs):
        out = forward(*args, **kwargs)
        self._seen[name] = (out if isinstance(out, Tensor) else out[0]).clone()
        return out


_ARRIVED = "what goes into"


class _Plain:
    """HF's plain forward of two texts, and how far each state of it moves by rounding: where the
    inputs of its layer are rounded once more to the coarsest data type of the model's, and at least
    by one rounding to its own.

    Args:
        model, route, tokens: of the trial.
        trace: of a view of the model.
        read: runs that view over the tokens, and returns logits; `None` for a forward of HF's.
        name: of what it does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        route: Route,
        tokens: Tensor,
        trace: _Trace,
        read: Callable[[], Tensor] | None = None,
        name: str = "its plain forward",
    ):
        self._model, self._route, self._tokens, self._name = model, route, tokens, name
        self.trace, self._read = trace, read or (lambda: read_whole(trace.view, tokens))
        self.states = self.trace.run(self._read)
        self.inputs = {n: state for n, state in self.states.items() if n.startswith(_ARRIVED)}
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
        """How far states move where layers are given this; at most so many roundings of theirs."""
        moved, found = self.trace.run(self._read, given), {}
        for name, state in self.states.items():
            size = _distance(state, torch.zeros_like(state))
            error = _distance(moved[name], state).minimum(most * self._unit * size)
            found[name] = error.maximum(unit_of(state) * size)
        return found

    def difference(
        self, slots: Tensor, ours: dict[str, Tensor], rows: Tensor | None = None
    ) -> Differences:
        """How far states of the tokens at slots `[B, N]` are from these; row i has the text `rows`
        `[B]` says, its own where that is `None`.
        """
        found = {
            name: _distance(x, _take(self.states[name], slots, rows)) for name, x in ours.items()
        }
        return {
            f"{name} differs from {self._name}": Difference(
                error, self._factor * _take(self.rounding[name], slots, rows)
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
                _distance(whole, own), allowed
            )
        }
        moved = self._moved(lambda name, x: self._rounded(x), MOST_ROUNDING[1])["the logits"]
        allowed = (STEPS_FACTOR if self._route.mixers else self._factor) * moved
        # HF hands a mask to attention functions of its own alone.
        is_usual = not self._route.mixers and not foreign_attention(self._model)
        steps = read_in_steps(self._model, self._tokens, in_pieces=is_usual)
        if steps is not None:
            name = "a text read token by token, with HF's own cache, has logits that differ"
            yield {name: Difference(_distance(steps, whole), allowed)}
        if self._route.num_tried:
            yield from self._beside_others(allowed)
            if is_usual:
                yield from self._behind_padding(allowed)

    def _beside_others(self, allowed: Tensor) -> Iterator[Differences]:
        """The same of batches of other sizes, and of what the model's own `generate` writes."""
        few = slice(0, FEW_TOKENS)
        for rows, logits in read_in_batches(self._model, self._tokens[:, few]):
            found = Difference(_distance(logits, self._whole[rows, few]), allowed[rows, few])
            yield {f"in a batch of {len(rows)} a text has logits that differ": found}
        if (own := generated(self._model, self._tokens[:, few])) is not None:
            text, logits = own
            whole = read_whole(self._model, text)[:, -logits.shape[1] - 1 : -1]
            found = _distance(logits, whole)
            most = allowed.amax().expand_as(found)
            yield {"its own `generate` has logits that differ": Difference(found, most)}

    def _behind_padding(self, allowed: Tensor) -> Iterator[Differences]:
        few = slice(0, FEW_TOKENS)
        padded = read_padded(self._model, self._tokens[:, few])
        if padded is not None:
            begun = slice(0, padded.shape[1])
            found = _distance(padded, self._whole[1:, begun])
            name = "behind padding a text has logits that differ"
            yield {name: Difference(found, allowed[1:, begun])}


class _Trial:
    """Ragged windows of two texts over a cache of garbage, beside the texts' plain forward; with
    edits of the user in the views, beside one window over the whole texts.
    """

    def __init__(
        self, model: PreTrainedModel, route: Route, number: int, edits: Sequence[Edit] = ()
    ):
        windows = route.layer_windows.values()
        sizes = [w.size if isinstance(w, Chunk) else w for w in windows if w is not None]
        length = max([6, *(size + 4 for size in sizes if size <= LONGEST_WINDOW)])
        if route.is_indexed:
            length = max(length, (FEW + 2) * max(BLOCK, *map(pool_size, model.modules())))
        for one in route.compressors:  # entries end in each half, more than indexers choose
            length = max(length, 2 * one.rate * (FEW if one.name == "indexer" else 1))
        limit = position_limit(model.config.get_text_config()) or length
        num_tried = max(route.num_tried, min(NUM_EDITED, limit) if edits else 0)
        length = max(min(length, limit), _fitting(model, num_tried))
        self._tokens = trial_texts(model, length, number)
        if not edits:
            whole = _Trace(open_view(model, Route()), route)
            self.plain = _Plain(model, route, self._tokens, whole)
        views = open_views(model, route, edits=edits)
        self._views, self._trace = views._replace(chunk=views.step), _Trace(views.step, route)
        device, self._narrow = self._tokens.device, 2 * length
        width = max(self._narrow, _width(model, sizes, route.shapes.values()))
        self._cache = route.init_cache(2, width, max_window=2 * length, extra_slots=0)
        # Row 0 keeps all of the first window, row 1 all but the last token of it.
        half = length // 2
        self._everything = torch.arange(length, device=device).expand(2, -1)
        self._first = self._everything[:, :half]
        self._kept = torch.tensor([[half], [half - 1]], device=device)
        self._later = self._kept + torch.arange(length - half, device=device)
        if edits:
            ends = torch.tensor([half - 2, length - 2], device=device)
            self._cache.row_inputs["prompt_end"] = ends
            read = partial(self._read, self._tokens, self._cache, self._everything)
            parts = self._tokens, self._trace, read, "one window over the whole text"
            self.plain = _Plain(model, route, *parts)

    def chains(self) -> Iterator[Differences]:
        """A window over as few slots as can be, and one of several tokens and one of a single one
        behind what was kept of it, over many slots.
        """
        first, later, one = (
            partial(_take, slots=s) for s in (self._first, self._later, self._kept)
        )
        self._states(lambda state: state.flip(0, 1), self._everything)  # the garbage
        self._spread_garbage()
        with narrowed([self._cache], self._narrow):
            narrow = self._states(first, self._first)
        yield self.plain.difference(self._first, narrow)
        yield self.plain.difference(self._later, self._states(later, self._later))
        yield self.plain.difference(self._kept, self._states(one, self._kept))
        if self._cache.memory is not None:  # the same behind a chunk of a prompt
            fill((self._cache.memory, self._cache.stores), 0)
            ragged = torch.where(self._first < self._kept, self._first, self._cache.padding_slot)
            self._states(first, ragged, is_chunk=True)
            yield self.plain.difference(self._later, self._states(later, self._later))
            fill((self._cache.memory, self._cache.stores), 0)  # and behind one of a single token
            self._states(first, ragged, is_chunk=True)
            self._states(one, self._kept, is_chunk=True)
            rest = self._later[:, 1:]
            yield self.plain.difference(rest, self._states(partial(_take, slots=rest), rest))

    def tree(self) -> Differences:
        """The second window once more, with an earlier sibling from the other text before each
        token but the root.
        """
        positions = self._later.repeat_interleave(2, dim=1)[:, 1:]  # root, sibling, token, ...
        count = positions.shape[1]
        order = torch.arange(count, device=positions.device)
        is_other = order % 2 == 1
        visible = (order <= order[:, None]) & (~is_other | (order == order[:, None]))

        def among(state: Tensor) -> Tensor:
            own, other = _take(state, positions), _take(state.flip(0), positions)
            mask = is_other.to(own.device).view(1, -1, *[1] * (own.dim() - 2))
            return torch.where(mask, other, own)

        tree = {"positions": positions, "visible": visible[None]}
        states = self._states(among, self._kept + order, **tree)
        return self.plain.difference(self._later, {n: state[:, ::2] for n, state in states.items()})

    def _states(self, pick: Callable, slots: Tensor, **window: Any) -> dict[str, Tensor]:
        """Everything to compare, of a window of tokens that are picked from the texts."""
        given = {name: pick(state) for name, state in self.plain.inputs.items()}
        tokens = pick(self._tokens)
        return self._trace.run(
            lambda: self._read(tokens, self._cache, slots, **window),
            lambda name, arrived: given[name],
        )

    def _read(self, tokens: Tensor, cache: SlotCache, slots: Tensor, **window: Any) -> Tensor:
        """Logits of a window."""
        return forward(
            self._views, tokens, cache, open_window(self._views, cache, slots, **window)
        )[0]

    def batches(self) -> Iterator[Differences]:
        """The two texts in batches of other sizes, each text at places where it did not stand."""
        for count in NUM_ROWS:
            for first in (0, 1):
                rows = (torch.arange(count, device=self._tokens.device) + first) % 2
                found = self.plain.difference(self._everything[rows], self._in_batch(rows), rows)
                yield {f"in a batch of {count} {name}": found[name] for name in found}

    def _in_batch(self, rows: Tensor) -> dict[str, Tensor]:
        """Everything to compare, of these texts as a batch."""
        length, route = self._tokens.shape[1], self._views.route
        cache = route.init_cache(len(rows), length, max_window=length)
        cache.row_inputs = {name: each[rows] for name, each in self._cache.row_inputs.items()}
        return self._trace.run(
            lambda: self._read(self._tokens[rows], cache, self._everything[rows]),
            lambda name, arrived: self.plain.inputs[name][rows.to(arrived.device)],
        )

    def _spread_garbage(self) -> None:
        """Copies what the first slots hold to all others."""
        length = self._tokens.shape[1]
        for store in self._cache.stores:
            for start in range(length, store.shape[2], length):
                count = min(length, store.shape[2] - start)
                store[:, :, start : start + count] = store[:, :, :count]


def _fitting(model: PreTrainedModel, length: int) -> int:
    """So many tokens of two texts, or as many as the states of all layers fit an eighth of the
    memory for, several times over.
    """
    config = model.config.get_text_config()
    size = 2 * 8 * 2 * config.num_hidden_layers * config.hidden_size * model.dtype.itemsize
    return min(length, (memory_bytes(model.device) or 2**33) // (8 * size))


_WINDOWED = re.compile("window|local|chunk|span")


def _width(model: PreTrainedModel, known: list[int], shapes: Iterable[KeyValueShape]) -> int:
    """Slots to attend over: more than any window that the model keeps where HF's masks do not show
    it, in a number or in a buffer by the positions of queries and keys, so far as the model has
    positions for so many and an eighth of the memory holds them.
    """
    hidden = [WIDTH]
    for module in model.modules():
        numbers = (v for name, v in vars(module).items() if _WINDOWED.search(name))
        hidden += [v + 1 for v in numbers if type(v) is int and v not in known]
        masks = (b.shape for b in module.buffers(recurse=False) if b is not None and b.dim() > 1)
        hidden += [shape[-1] for shape in masks if shape[-1] == shape[-2]]
    width = min(max(hidden), position_limit(model.config.get_text_config()) or max(hidden))
    for device in {shape.device for shape in shapes}:
        size = sum(
            heads * (keys + values) * dtype.itemsize
            for heads, keys, values, dtype, place in shapes
            if place == device
        )
        width = min(width, (memory_bytes(device) or 2**33) // (8 * 2 * size))
    return width


def _take(state: Tensor, slots: Tensor, texts: Tensor | None = None) -> Tensor:
    """`[B, N, ...]`, the tokens at slots `[B, N]` of a state `[2, T, ...]`: of its rows in order,
    or of these.
    """
    rows = torch.arange(2, device=slots.device) if texts is None else texts
    rows = rows.to(state.device)[:, None]
    return state[rows, slots.to(state.device)]


def unit_of(state: Tensor) -> float:
    """One rounding to the data type of its products, in parts of a state."""
    rounds_products = state.is_cuda and torch.backends.cuda.matmul.allow_tf32
    # HF computes softmax and rotary angles in float32 even where a model is in float64.
    unit = max(torch.finfo(dtype).eps for dtype in (state.dtype, torch.float32))
    return max(unit, 2.0**-10 if rounds_products else 0.0)


def _distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """`[2, N]`, how far states `[2, N, ...]` are from others, in rms over channels."""
    wide = torch.promote_types(ours.dtype, torch.float32)
    ours, theirs = ours.to(wide), theirs.to(ours.device, wide)
    error = torch.where(ours == theirs, 0.0, ours - theirs)  # of two infinities, too
    return error.flatten(2).square().mean(dim=-1).sqrt().float()
