"""`SlotModel`: an unmodified HF causal LM run over a `SlotCache`.

The target and every drafter that is itself an HF model are built on this. The model is switched to
specdec's attention function only inside a forward and switched back on the way out, so it is found
as it was left at any other moment: between steps, after an exception, or when a stream is abandoned
half-way.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.attention import ATTENTION_NAME, window_mask
from specdec.cache import SlotCache, Window
from specdec.features import CaughtFeatures, FeatureLayer

FORWARD_FIELDS = {
    "_attn_implementation_internal": ATTENTION_NAME,
    # With an id for padding GPT-2 searches its input for it, to warn: the host would wait.
    "pad_token_id": None,
}
"""Fields of an HF configuration, and what they hold while specdec runs a forward."""

UNDERSTOOD_LAYERS = {"full_attention", "sliding_attention"}


class SlotModel:
    """Runs windows of tokens of an HF causal LM at given slots, each row with a length of its own.

    Args:
        model: a decoder-only `PreTrainedModel` with full or sliding-window attention, in eval mode.

    Raises:
        TypeError: not an HF model.
        ValueError: a model that cannot be decoded this way (recurrent or hybrid layers,
            encoder-decoder, training mode, or one whose windowed forward does not reproduce its
            plain forward), with what to do instead.
    """

    def __init__(self, model: PreTrainedModel):
        _refuse_unsupported(model)
        self.model = model
        self.config = model.config.get_text_config()
        self.vocab_size: int = self.config.vocab_size
        self.max_positions = _position_limit(self.config)
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        # Sub-models can own configs of their own (a text model inside a multimodal one): switch all
        # of them.
        configs = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
        self._configs = [
            (config, [name for name in FORWARD_FIELDS if name in vars(config)])
            for config in {id(config): config for config in configs}.values()
        ]
        self._audit: dict | None = None
        self._run = self._find_route()

    @property
    def device(self) -> torch.device:
        """Device of the embeddings, where tokens go in."""
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.model.dtype

    @property
    def num_layers(self) -> int:
        """Decoder layers L."""
        return self.config.num_hidden_layers

    def forward(
        self,
        tokens: Tensor,
        cache: SlotCache,
        slots: Tensor,
        *,
        reach: int,
        logits_to_keep: int = 0,
        feature_layers: tuple[FeatureLayer, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """One forward of a window; keys and values are written at `slots`, lengths are left alone.

        Args:
            tokens: `[B, N]` int64 ids of the vocabulary.
            cache: the rows' storage.
            slots: `[B, N]` int64, slot (= position) of each token; `cache.trash` for tokens to
                forget.
            reach: host upper bound of the largest real slot, plus 1.
            logits_to_keep: compute logits of the last so many tokens only; 0 for all of them.
            feature_layers: boundaries `0..L` or `"final"`, in the order wanted.

        Returns:
            Logits `[B, N or logits_to_keep, V]`, and features `[B, N, F]` or `None`.
        """
        window = cache.open_window(slots, reach=reach)
        window.audit = self._audit
        inputs = {"input_ids": tokens, "past_key_values": cache}
        if self._takes_positions:
            # Slots at or beyond the last position hold only tokens that will be forgotten.
            limit = self.max_positions
            fits = limit is None or cache.trash < limit
            inputs["position_ids"] = slots if fits else slots.clamp(max=limit - 1)
        if self._takes_logits_to_keep:
            inputs["logits_to_keep"] = logits_to_keep
        if feature_layers:
            with CaughtFeatures(self.model, self.num_layers, feature_layers) as caught:
                logits = self._run(window, inputs)
            features = caught.joined()
        else:
            logits, features = self._run(window, inputs), None
        if not self._takes_logits_to_keep and logits_to_keep:
            logits = logits[:, -logits_to_keep:]
        return logits, features

    def _run_with_slot_attention(self, window: Window, inputs: dict) -> Tensor:
        # Straight into the fields: HF's checked attribute access would cost 25 us per forward.
        found = []
        try:
            for config, names in self._configs:
                fields = object.__getattribute__(config, "__dict__")
                found.append((fields, [fields[name] for name in names]))
                for name in names:
                    fields[name] = FORWARD_FIELDS[name]
            return self.model(**inputs, use_cache=True, slot_window=window).logits
        finally:
            for (_, names), (fields, values) in zip(self._configs, found, strict=False):
                fields.update(zip(names, values, strict=True))

    def _run_with_dense_mask(self, window: Window, inputs: dict) -> Tensor:
        """For models that never call HF's attention interface but pass a 4-D mask through."""
        mask = window_mask(window, None, self.dtype, window.slots.device)
        return self.model(**inputs, attention_mask=mask, use_cache=True).logits

    def _find_route(self) -> Callable[[Window, dict], Tensor]:
        """The first way of running the model that reproduces its own plain forward.

        Architectures hide masks, biases and positions in many places, so a model is believed only
        after it has been tried.

        Raises:
            ValueError: none does.
        """
        routes = [self._run_with_slot_attention]
        if not self._sliding_layers():  # one dense mask cannot serve two kinds of layers
            routes.append(self._run_with_dense_mask)
        complaints = []
        for route in routes:
            self._run, self._audit = route, {}
            try:
                difference = _difference_from_plain_forward(self) or self._forgotten_window()
            except Exception as error:  # whatever a foreign model raises means: not this route
                complaints.append(f"{type(error).__name__}: {error}")
                continue
            if difference is None:
                self._audit = None
                return route
            complaints.append(difference)
        raise ValueError(
            f"{type(self.model).__name__} cannot be decoded over specdec's cache "
            f"({'; then '.join(complaints)}). Use HF generate for this model"
        )

    def _forgotten_window(self) -> str | None:
        """A complaint if a sliding layer ran without its window; six tokens cannot show it."""
        for layer in self._sliding_layers():
            if self._audit.get(layer) is None:
                return f"layer {layer} is sliding_attention but passes no sliding_window"
        return None

    def _sliding_layers(self) -> list[int]:
        """Layers that the configuration declares as sliding-window attention."""
        layer_types = getattr(self.config, "layer_types", None) or ()
        return [i for i, kind in enumerate(layer_types) if kind == "sliding_attention"]


def _position_limit(config: PreTrainedConfig) -> int | None:
    """Positions that the model can be given.

    Rotary scalings that look at the longest position of a forward ("longrope", "dynamic") change
    every position's angle once it passes the original range. Plain decoding switches in mid-text; a
    batch of drafts cannot, so such models are served within that range.
    """
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    rope = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in (rope, *per_layer_type):
        if parameters.get("rope_type") in ("longrope", "dynamic"):
            original = parameters.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(limit, original or limit)
    return limit


def _refuse_unsupported(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"expected a Hugging Face PreTrainedModel, got {name}")
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder model; specdec decodes decoder-only models. Use HF "
            "generate for it"
        )
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - UNDERSTOOD_LAYERS)
    if foreign or getattr(model, "_is_stateful", False):
        layers = ", ".join(foreign) or "recurrent state"
        raise ValueError(
            f"{name} has layers that specdec cannot rewind yet: {layers}. Models whose layers are "
            "all "
            "full_attention or sliding_attention work; use HF generate for this one"
        )
    if model.training:
        raise ValueError(
            f"{name} is in training mode, where dropout changes its output; call model.eval() first"
        )


@torch.no_grad()
def _difference_from_plain_forward(slot_model: SlotModel) -> str | None:
    """A complaint if ragged windows over a cache of garbage differ from a plain forward."""
    device = slot_model.device
    tokens = (torch.arange(12, device=device).view(2, 6) * 7 + 1) % slot_model.vocab_size
    steps = torch.arange(6, device=device)
    cache = SlotCache(2, 8, device=device)
    slot_model.forward(tokens.flip(0, 1), cache, steps.expand(2, 6), reach=6)
    # Row 0 keeps both tokens of the first window, row 1 only the first.
    kept = torch.tensor([[2], [1]], device=device)
    first, _ = slot_model.forward(tokens[:, :2], cache, steps[:2].expand(2, 2), reach=2)
    slots = kept + steps[:4]
    rest, _ = slot_model.forward(tokens.gather(1, slots), cache, slots, reach=6)
    plain = slot_model.model(input_ids=tokens, use_cache=False).logits.float()
    differences = [
        (first[0] - plain[0, :2]),
        (first[1, :1] - plain[1, :1]),
        (rest[0] - plain[0, 2:6]),
        (rest[1] - plain[1, 1:5]),
    ]
    largest = torch.stack([d.abs().max() for d in differences]).max().item()
    # Rounding differs between a window and a whole sequence; a wrong mask or position shows at
    # the size of the logits themselves.
    tolerance = 1e-3 if slot_model.dtype.itemsize >= 4 else 0.1
    if largest <= tolerance * plain.std().item() + 1e-6:
        return None
    return f"its logits differ from its plain forward by {largest:.3g}"
