"""What goes through the layers of a model in a forward, for the self-test to compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from specdec.hf.layers import Streams, decoder_layers
from specdec.targets.route import Route
from specdec.targets.view import wrap_forward

ARRIVED = "what goes into"
"""Begins the name of what a decoder layer is given."""


class LayerTrace:
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
        name = f"{ARRIVED} layer {index}{of_run}"
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
