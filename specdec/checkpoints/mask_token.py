"""Mask-token checkpoints of every public layout: P-EAGLE, PARD, DFlash and its successors.

P-EAGLE heads (amazon, speculators, SpecForge) are EAGLE-3 heads with a learned feature of masks,
and are read by EAGLE's reader. PARD models are causal language models with the id of a mask. DFlash
heads (z-lab, speculators, TorchSpec, Hugging Face's assistants, DeepSpec's of that architecture)
read features as keys and values; DSpark, Domino, DFlash 2 and XPress are DFlash heads with a
correction inside the block.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any, get_args

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.correction import read_correction
from specdec.checkpoints.eagle import EagleReading, unsupported_wiring
from specdec.checkpoints.family import Family, Source, Translation, refuse_unsupported
from specdec.checkpoints.files import CheckpointFolder, StoredTensor
from specdec.checkpoints.layer_ids import (
    CONVENTIONS,
    NAME_THEM,
    check_layers,
    evenly_spaced,
    find_layer_ids,
)
from specdec.checkpoints.layers import read_windows
from specdec.checkpoints.reading import HeadReading, open_head, unsupported_weights
from specdec.heads.layers import LayerConfig
from specdec.heads.mask_token import Alignment, MaskTokenConfig, MaskTokenHead
from specdec.heads.sharing import check_target
from specdec.target.features import FeatureLayer
from specdec.target.target import MAX_VOCAB_PADDING

P_EAGLE, PARD, DFLASH, DFLASH2 = "P-EAGLE", "PARD", "DFlash", "DFlash 2"
DSPARK, DOMINO, XPRESS = "DSpark", "Domino", "XPress"
_SPECULATORS = {
    "peagle": P_EAGLE,
    "dflash": DFLASH,
    "dflash2": DFLASH2,
    "dspark": DSPARK,
    "xpress": XPRESS,
}
_PROJECTORS = {"dspark": DSPARK, "domino": DOMINO}
_PARD_KEYS = ("pard_token", "spd_type", "pard2_target_layers", "pard2_target_dim")
_DSPARK_KEYS = ("markov_rank", "markov_head_type", "dspark_noise_token_id")
_ARCHITECTURES = (
    ("DSpark", "SpecForge", DSPARK),
    (".*DSpark", "DeepSpec", DSPARK),
    (".*PEagle", "SpecForge", P_EAGLE),
    ("Domino", "SpecForge", DOMINO),
    ("DFlash2", "z-lab", DFLASH2),
)
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_ID_KEYS = {
    "target_layer_ids": ("layer_output", -1),
    "dflash_config.target_layer_ids": ("layer_output", 0),
    "dflash_config.layer_ids": ("boundary", 0),
    "aux_hidden_state_layer_ids": ("boundary", 0),
}
"""Keys of layer ids of DFlash, how their usual readers take them, and the lowest id."""
_WITHOUT_MEANING = (
    "parallel_drafting",  # vLLM's switch
    "enable_confidence_head",  # its tensors say so
    "confidence_head_with_markov",
    "confidence_head_alpha",  # of training
    "attention_mode",  # whether there are fewer key heads
    "projector_type",
    "speculators_model_type",
)
"""Keys of either section that make no difference by themselves to a head that is not refused."""
PARD_MODELS = ("llama", "qwen2", "qwen3")
"""Architectures of language models that are read, by their `model_type`."""


def detect(folder: CheckpointFolder) -> Source | None:
    """The producer: `"speculators"`, `"amazon"`, `"SpecForge"`, `"AMD"`, `"z-lab"`,
    `"Hugging Face"` or `"DeepSpec"`. The kind is the design by its name in papers.
    """
    fields = folder.fields
    architectures = fields.strings("architectures")
    kind = fields.get("speculators_model_type")
    if kind is not None:
        named = _SPECULATORS.get(kind) if isinstance(kind, str) else None
        return named and Source("speculators", named, f"speculators_model_type {kind!r}")
    for keys, *source in ((_PARD_KEYS, "AMD", PARD), (_DSPARK_KEYS, "DeepSpec", DSPARK)):
        if found := [key for key in keys if fields.get(key) is not None]:
            return Source(*source, f"config.json has {found[0]}")
    for name in architectures:
        for start, *source in _ARCHITECTURES:
            if re.match(start, name):
                return Source(*source, f"architecture {name}")
    if fields.get("dflash_config") is not None:
        kind = fields.section("dflash_config").get("projector_type")
        if kind in _PROJECTORS:
            return Source("SpecForge", _PROJECTORS[kind], f"projector_type {kind!r}")
        return Source("z-lab", DFLASH, "config.json has dflash_config")
    if found := [name for name in architectures if name.startswith("DFlash")]:
        return Source("z-lab", DFLASH, f"architecture {found[0]}")
    if fields.get("ptd_token_id") is not None:
        return Source("amazon", P_EAGLE, "config.json has ptd_token_id")
    marks = ("mask_hidden", "hidden_norm.weight", "encoder.fc.weight")
    found = folder.tensors(lambda name: name.endswith(marks))
    has_hidden, is_eagle, has_encoder = (any(name.endswith(m) for name in found) for m in marks)
    if has_encoder:
        return Source("Hugging Face", DFLASH, "tensor encoder.fc")
    if has_hidden and is_eagle:
        return Source("SpecForge", P_EAGLE, "tensor mask_hidden beside an EAGLE-3 head's")
    return None


def translate(
    folder: CheckpointFolder,
    source: Source,
    target: PreTrainedModel | None,
    options: Mapping[str, Any],
) -> Translation:
    """Reads the whole configuration; see `Family`."""
    fields, tensors = open_head(folder, source)
    refuse_unsupported(fields, _unsupported(folder, fields, source, tensors))
    reading = MaskTokenReading(fields, source, tensors, options)
    config = {P_EAGLE: reading.p_eagle, PARD: reading.pard}.get(source.kind, reading.dflash)(target)
    reading.check_joined(config)
    for key in _WITHOUT_MEANING:
        reading.either.get(key)
    return Translation(config, tensors, fields, {})


def _unsupported(
    folder: CheckpointFolder, fields: ConfigFields, source: Source, names: Collection[str]
) -> Iterator[tuple[bool, str]]:
    """Pairs (condition, message): what a mask-token head of the library cannot have."""
    flash = fields.section("dflash_config")
    beside = {path.name for path in folder.path.iterdir()}
    is_pard2 = any(key.startswith("pard2_") for key in fields.raw)
    is_pard2 = is_pard2 or bool({"warp_model.bin", "pard_warp_model"} & beside)
    yield is_pard2, "PARD-2: a language model that reads the target's features through warp_model"
    yield "mask_embedding.pt" in beside, "mask_embedding.pt: a pickled embedding of the masks"
    if source.kind == P_EAGLE:
        yield from unsupported_wiring(fields, source, names)
    else:
        yield from unsupported_weights(fields, names)
    if source.kind == PARD:
        model_type = fields.text("model_type", "llama")
        yield model_type not in PARD_MODELS, f"model_type {model_type!r} of {list(PARD_MODELS)}"
    is_all = flash.flag("use_aux_hidden_state", default=True)
    yield not is_all, "dflash_config.use_aux_hidden_state: false"
    is_windowed = source.kind == P_EAGLE and fields.flag("use_sliding_window")
    yield is_windowed and source.producer != "speculators", "use_sliding_window of a P-EAGLE head"
    for key in ("attention_value_scale", "input_embedding_scale"):
        factor = flash.get(key, 1)
        yield factor != 1, f"dflash_config.{key} {factor}: scaled values or embeddings"
    softcap = flash.get("final_logit_softcapping", 0)
    yield softcap != 0, f"dflash_config.final_logit_softcapping {softcap}: capped logits"
    is_dflare = any("DFlare" in name for name in fields.strings("architectures"))
    yield is_dflare, "architecture DFlare, of which no wiring is known here"
    is_turned = not fields.flag("is_neox_style", default=True)
    yield is_turned, "is_neox_style false: rotary channels in pairs of neighbours"


class MaskTokenReading(HeadReading):
    """Reads one configuration, to `MaskTokenConfig`. Tensors of which the shape differs between
    producers are replaced.
    """

    @property
    def flash(self) -> ConfigFields:
        """DFlash's own section."""
        return self.fields.section("dflash_config")

    @property
    def either(self) -> ConfigFields:
        """Keys that producers write at the top or in DFlash's section. Both of `is_causal` hold for
        all layers: z-lab's `dflash/model.py`, vLLM 0.33's `_dflash_layer_causal`.
        """
        return self.fields.with_section("dflash_config", is_causal="causal")

    def p_eagle(self, target: PreTrainedModel | None) -> MaskTokenConfig:
        """An EAGLE-3 head, and what its masks are."""
        fields, producer = self.fields, self.source.producer
        source = Source("vLLM" if producer == "amazon" else producer, "EAGLE-3", self.source.why)
        eagle = EagleReading(fields, source, self.tensors, self.options).config(target)
        if not eagle.has_fc:
            raise ValueError(f"{fields.origin}: a P-EAGLE head joins features through fc")
        if eagle.feedback_norm:
            self.notes.append("norm_output has no meaning here: nothing is fed back")
        self._reshape("mask_hidden", (1, 1, eagle.feature_width))
        names = [field.name for field in fields_of(MaskTokenConfig) if hasattr(eagle, field.name)]
        correction, _ = read_correction(fields, self.tensors, kind=self.source.kind)
        return MaskTokenConfig(
            **self._design("shifted", "input"),
            **{name: getattr(eagle, name) for name in names},
            mask_token_id=self._mask_token(eagle.vocab_size),
            correction=correction,
        )

    def pard(self, target: PreTrainedModel | None) -> MaskTokenConfig:
        """A language model; its vocabulary may differ from the target's by padding."""
        fields = self.fields
        self._refuse_options("feature_layers", "layer_convention", "norm_before_residual")
        own_size = vocab_size = fields.integer("vocab_size")
        hidden_size = fields.integer("hidden_size")
        if target is not None:
            text = target.config.get_text_config()
            vocab_size, hidden_size = text.vocab_size, text.hidden_size
            self._fit_vocabulary(own_size, vocab_size)
        return MaskTokenConfig(
            **self._design("unshifted", "none"),
            layer=self.asked_layer(
                replace(
                    self._layer(has_output_bias=fields.get("model_type") != "qwen2"),
                    windows=read_windows(fields),
                )
            ),
            vocab_size=vocab_size,
            draft_vocab_size=min(own_size, vocab_size),
            feature_layers=(),
            target_hidden_size=hidden_size,
            num_layers=fields.integer("num_hidden_layers"),
            mask_token_id=self._mask_token(min(own_size, vocab_size)),
            has_embed_tokens=True,
            ties_embeddings="lm_head.weight" not in self.tensors
            and fields.flag("tie_word_embeddings"),
            max_positions=fields.integer("max_position_embeddings", 2048),
        )

    def dflash(self, target: PreTrainedModel | None) -> MaskTokenConfig:
        """A block of masks that reads features as keys and values."""
        fields = self.fields
        self._refuse_options("norm_before_residual")
        layer, theirs = self._layer(has_output_bias=True), None
        if self.source.producer == "Hugging Face":
            if target is None:
                raise ValueError(f"{fields.origin} leaves vocab_size to the target: pass one")
            theirs = target.config.get_text_config().vocab_size
        vocab_size = fields.integer("vocab_size", theirs)
        draft_size = self.draft_vocab_size() if self.is_speculators else vocab_size
        target_hidden_size = fields.integer("target_hidden_size", layer.hidden_size)
        num_layers = self._num_target_layers(target)
        if target is not None:
            check_target(target, target_hidden_size, vocab_size, what=fields.origin)
        correction, convolution = read_correction(fields, self.tensors, kind=self.source.kind)
        windows, is_window_causal = read_windows(fields), self._is_window_causal()
        if self.source.producer == "Hugging Face":  # its masks of both directions reach one further
            windows = tuple(window and window + 1 for window in windows)
        layer = replace(
            layer,
            windows=windows,
            is_window_causal=is_window_causal or not windows,
            has_sinks="layers.0.self_attn.sinks" in self.tensors,
            convolution=convolution,
        )
        layer = self.asked_layer(layer)
        for key in ("attention_sink_bias", "add_swa_attention_sink_bias"):
            self.either.get(key)  # the tensors say so
        design = self._design(self._block_alignment(), "keys")
        if design["alignment"] == "next-token":
            self.notes.append("rows predict the token after their own position (next-token)")
        return MaskTokenConfig(
            **design,
            layer=layer,
            vocab_size=vocab_size,
            draft_vocab_size=draft_size,
            feature_layers=self._features(num_layers),
            target_hidden_size=target_hidden_size,
            num_layers=fields.integer("num_hidden_layers", 1),
            mask_token_id=self._mask_token(vocab_size),
            block_size=self._block_size(),
            has_embed_tokens="embed_tokens.weight" in self.tensors,
            has_lm_head="lm_head.weight" in self.tensors or draft_size < vocab_size,
            logit_scale=self.flash.number("output_multiplier", 1.0),
            correction=correction,
            confidence=self._confidence(layer.hidden_size),
        )

    def _block_alignment(self) -> Alignment:
        """What `sample_from_anchor` says, or Domino's `shift_label`; else what the design has."""
        fields, is_dspark = self.either, self.source.kind == DSPARK
        key = "shift_label" if self.source.kind == DOMINO else "sample_from_anchor"
        if fields.get(key) is None and is_dspark and self.is_speculators:
            self.notes.append(
                "no sample_from_anchor: true, speculators' default for dspark (vLLM's is false)"
            )
        return "next-token" if fields.flag(key, default=is_dspark) else "same-position"

    def _is_window_causal(self) -> bool:
        """Whether rows of a block see only those before them, in layers with a sliding window."""
        fields = self.fields
        if self.is_speculators:
            is_free = self.source.kind == DFLASH2
            return not fields.flag("sliding_window_non_causal", default=is_free)
        # Layers with a window by use_swa alone see the whole block (MiMo's), and so do HF's.
        usual = "sliding_attention" in fields.strings("layer_types")
        usual = usual and self.source.producer != "Hugging Face"
        return self.either.flag("is_causal", default=usual)

    def _confidence(self, hidden_size: int) -> str | None:
        """What the confidence head reads, by the width of its weights."""
        stored = self.tensors.get("confidence_head.weight")
        if stored is None or len(stored.shape) != 2:
            return None
        return "hidden" if stored.shape[1] == hidden_size else "markov"

    def _design(self, alignment: str, context: str) -> dict[str, Any]:
        """Alignment and context, and whether rows are causal, with the caller's options."""
        is_causal = context != "keys" or self.either.flag("is_causal")
        usual = {"alignment": alignment, "is_causal": is_causal}
        asked = {name: self.options.get(name, value) for name, value in usual.items()}
        return {**asked, "context": context}

    def _refuse_options(self, *names: str) -> None:
        given = sorted(set(names) & self.options.keys())
        if given:
            raise ValueError(f"{', '.join(given)}: a {self.source.kind} head has none; drop it")

    def _mask_token(self, vocab_size: int) -> int | None:
        """The id of masks: the option, the one in the file, or a tensor of the head's instead."""
        fields, flash, options = self.fields, self.flash, self.options
        named = {key: fields.get(key) for key in _MASK_KEYS}
        named["dflash_config.mask_token_id"] = flash.get("mask_token_id")
        named = {key: value for key, value in named.items() if value is not None}
        text = flash.get("mask_token")
        if "mask_token_id" in options:
            named = {"mask_token_id (asked for)": options["mask_token_id"]}
        elif "mask_embedding" in self.tensors and not named:
            self._reshape("mask_embedding", (1, 1, fields.integer("hidden_size")))
            return None
        if not named:
            what = "" if text is None else f" but the text {str(text)[:40]!r}"
            raise ValueError(
                f"{fields.origin} names no id of a mask token{what}; pass mask_token_id= "
                "(command line: --mask-token-id) with the one that the head was trained with"
            )
        if len(set(map(str, named.values()))) > 1:
            raise ValueError(f"{fields.origin} names more than one mask token: {named}")
        key, token = next(iter(named.items()))
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(
                f"{fields.origin}: {key} must be an id in 0..{vocab_size - 1}, got "
                f"{str(token)[:40]}"
            )
        return token

    def _layer(self, *, has_output_bias: bool) -> LayerConfig:
        """Layers of HF's Llama, Qwen2 or Qwen3."""
        kind, has_bias = self.fields.get("model_type"), self.fields.flag("attention_bias")
        in_file = "layers.0.self_attn.q_proj.bias" in self.tensors
        return self.layer(
            has_qk_norm=kind == "qwen3",
            attention_bias=has_bias or (in_file and kind == "qwen2"),
            attention_output_bias=has_bias and has_output_bias,
        )

    def _num_target_layers(self, target: PreTrainedModel | None) -> int | None:
        """N, which the configuration may name as well."""
        # TorchSpec's num_target_layers is the number of features.
        key = "target_num_hidden_layers"
        key = key if self.fields.get(key) is not None else "num_target_layers"
        named = self.fields.get(key)
        if named is not None:
            named = self.fields.integer(key, high=4096)
        if target is None:
            return named
        count = target.config.get_text_config().num_hidden_layers
        if named not in (None, count):
            raise ValueError(
                f"{self.fields.origin} was made for a target of {named} layers, but "
                f"{type(target).__name__} has {count}"
            )
        return count

    def _block_size(self) -> int:
        """At the top level (older files), in `dflash_config`, or speculators' default."""
        usual = 8 if self.is_speculators else None
        if usual and self.either.get("block_size") is None:
            self.notes.append(f"no block_size: {usual}, speculators' default")
        return self.either.integer("block_size", usual, high=1024)

    def _features(self, num_layers: int | None) -> tuple[FeatureLayer, ...]:
        """The boundaries that the head reads."""
        fields, asked = self.fields, self.asked_layers(num_layers)
        if asked is not None:
            return asked
        if found := find_layer_ids(fields, _ID_KEYS):
            return self.boundaries(found, num_layers)
        if self.is_speculators or num_layers is None:
            raise ValueError(f"{fields.origin} names no layers of features; {NAME_THEM}")
        key = "num_hidden_layers"
        if fields.get("target_num_hidden_layers") is not None:
            key = "num_target_layers"
        layers = evenly_spaced(fields.integer(key, 1, high=64), num_layers)
        self.notes.append(f"no layer ids: {key}, evenly spaced: boundaries {list(layers)}")
        return check_layers("feature_layers", layers, num_layers)

    def _reshape(self, name: str, shape: tuple[int, ...]) -> None:
        """Gives a vector the shape that it has in the head."""
        stored = self.tensors.get(name)
        if stored is not None and stored.shape in (shape, shape[1:], shape[2:]):
            self.tensors[name] = replace(
                stored, shape=shape, read=lambda: stored.read().reshape(shape)
            )

    def _fit_vocabulary(self, own_size: int, vocab_size: int) -> None:
        """Cuts or pads the tables to the target's vocabulary: what differs is padding."""
        if own_size == vocab_size:
            return
        if abs(own_size - vocab_size) > MAX_VOCAB_PADDING:
            raise ValueError(
                f"{self.fields.origin} has a vocabulary of {own_size} and the target's is "
                f"{vocab_size}; they must share a tokenizer (a difference of up to "
                f"{MAX_VOCAB_PADDING} is taken for padding)"
            )
        self.notes.append(
            f"a vocabulary of {own_size} for a target's of {vocab_size}: padding, cut or left out"
        )
        for name, count in (("embed_tokens", vocab_size), ("lm_head", min(own_size, vocab_size))):
            stored = self.tensors.get(f"{name}.weight")
            if stored is not None and stored.shape[:1] == (own_size,):
                self.tensors[f"{name}.weight"] = _with_rows(stored, count)
        if own_size < vocab_size:
            zeros = torch.zeros(own_size, dtype=torch.int64)
            self.tensors["d2t"] = StoredTensor("d2t", "I64", (own_size,), lambda: zeros)


def _with_rows(stored: StoredTensor, count: int) -> StoredTensor:
    """A table cut to so many rows, or with rows of zeros for ids that never occur."""
    missing = count - stored.shape[0]
    return replace(
        stored,
        shape=(count, *stored.shape[1:]),
        read=lambda: F.pad(stored.read(), (0, 0, 0, missing)),
    )


MASK_TOKEN = Family(
    name="mask token",
    marks="keys ptd_token_id, pard_token, dflash_config, or tensor mask_hidden",
    detect=detect,
    translate=translate,
    head=MaskTokenHead,
    options={
        "mask_token_id": (),
        "alignment": get_args(Alignment),
        "is_causal": (True, False),
        "layer_convention": CONVENTIONS,
        "feature_layers": (),
        "rope_theta": (),
        "layer": (),
        "norm_before_residual": (True, False),
    },
)
"""P-EAGLE, PARD and DFlash.

The options are what a caller may know better than a checkpoint's configuration says.
`mask_token_id`: of the masks, where the configuration names none or another. `alignment` and
`is_causal`: as in `MaskTokenConfig`. The others are as in `specdec.checkpoints.eagle.EAGLE`.
"""
