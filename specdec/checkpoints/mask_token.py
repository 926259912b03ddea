"""Mask-token checkpoints of every public layout: P-EAGLE, PARD and DFlash.

P-EAGLE heads (amazon, speculators, SpecForge) are EAGLE-3 heads with a learned feature of masks,
and are read by EAGLE's reader. PARD models are causal language models with the id of a mask. DFlash
heads (z-lab, speculators, TorchSpec, Hugging Face's assistants, DeepSpec's of that architecture)
read features as keys and values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TypedDict

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from specdec.arguments import hints_of
from specdec.checkpoints import layer_ids, rope, sizes
from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.eagle import (
    EagleReading,
    canonical_names,
    check_joined,
    unsupported_layers,
)
from specdec.checkpoints.family import (
    Family,
    Misreading,
    Source,
    Translation,
    misread,
    refuse_unsupported,
)
from specdec.checkpoints.files import CheckpointFolder, StoredTensor
from specdec.checkpoints.layer_ids import Convention, LayerIds
from specdec.heads.config import LayerConfig
from specdec.heads.mask_token import Alignment, MaskTokenConfig, MaskTokenHead
from specdec.heads.sharing import check_target
from specdec.target.features import FeatureLayer
from specdec.target.hf_model import MAX_VOCAB_PADDING


class MaskTokenOptions(TypedDict, total=False):
    """What a caller may know better than a checkpoint's configuration says; `None` leaves it.

    `mask_token_id`: of the masks, where the configuration names none or another. `alignment` and
    `is_causal`: as in `MaskTokenConfig`. `layer_convention`, `feature_layers`, `rope_theta`,
    `norm_before_residual`: as in `specdec.checkpoints.eagle.EagleOptions`.
    """

    mask_token_id: int | None
    alignment: Alignment | None
    is_causal: bool | None
    layer_convention: Convention | None
    feature_layers: tuple[FeatureLayer, ...] | None
    rope_theta: float | None
    norm_before_residual: bool | None


Tensors = dict[str, StoredTensor]

P_EAGLE, PARD, DFLASH, DSPARK = "P-EAGLE", "PARD", "DFlash", "DSpark"
_SPECULATORS = {"peagle": P_EAGLE, "dflash": DFLASH, "dflash2": DFLASH, "dspark": DSPARK}
_PARD_KEYS = ("pard_token", "spd_type", "pard2_target_layers", "pard2_target_dim")
_DSPARK_KEYS = ("markov_rank", "markov_head_type", "dspark_noise_token_id")
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_MAX_BLOCK = 1024
_CONFIDENCE = "an estimate of acceptance, on which no draft token depends"
_WITHOUT_MEANING = (
    "parallel_drafting",  # vLLM's switch
    "sliding_window_non_causal",  # of sliding layers
    "enable_confidence_head",
    "confidence_head_with_markov",
)
"""Keys that are read and make no difference to a head that is not refused."""
PARD_MODELS = ("llama", "qwen2", "qwen3")
"""Architectures of language models that are read, by their `model_type`."""


def detect(folder: CheckpointFolder) -> Source | None:
    """The producer: `"speculators"`, `"amazon"`, `"SpecForge"`, `"AMD"`, `"z-lab"`,
    `"Hugging Face"` or `"DeepSpec"`. The kind is `"P-EAGLE"`, `"PARD"`, `"DFlash"` or `"DSpark"`.
    """
    fields = folder.fields
    architectures = fields.strings("architectures")
    kind = fields.get("speculators_model_type")
    if kind is not None:
        named = _SPECULATORS.get(kind) if isinstance(kind, str) else None
        return named and Source("speculators", named, f"speculators_model_type {kind!r}")
    if keys := [key for key in _PARD_KEYS if fields.get(key) is not None]:
        return Source("AMD", PARD, f"config.json has {keys[0]}")
    if keys := [key for key in _DSPARK_KEYS if fields.get(key) is not None]:
        return Source("DeepSpec", DSPARK, f"config.json has {keys[0]}")
    for name in architectures:
        if "DSpark" in name:
            return Source("DeepSpec", DSPARK, f"architecture {name}")
        if "PEagle" in name:
            return Source("SpecForge", P_EAGLE, f"architecture {name}")
        if name.startswith(("DFlash", "Domino")):
            return Source("z-lab", DFLASH, f"architecture {name}")
    if fields.get("dflash_config") is not None:
        return Source("z-lab", DFLASH, "config.json has dflash_config")
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
    options: MaskTokenOptions,
) -> Translation:
    """Reads the whole configuration; see `Family`."""
    fields, in_file = folder.fields, folder.tensors()
    if source.producer == "speculators" and "transformer_layer_config" in fields.raw:
        fields = sizes.fill_speculators(fields)
    tensors = {name: in_file[other] for name, other in canonical_names(in_file).items()}
    refuse_unsupported(fields, _unsupported(folder, fields, source, tensors))
    reading = MaskTokenReading(fields, source, tensors, options)
    config = {P_EAGLE: reading.p_eagle, PARD: reading.pard}.get(source.kind, reading.dflash)(target)
    for key in _WITHOUT_MEANING:
        fields.get(key)
    unused = {name: _CONFIDENCE for name in tensors if name.startswith("confidence_head.")}
    return Translation(config, reading.tensors, fields, unused)


def _unsupported(
    folder: CheckpointFolder, fields: ConfigFields, source: Source, names: Collection[str]
) -> Iterator[tuple[bool, str]]:
    """Pairs (condition, message): what a mask-token head of the library cannot have."""
    flash = fields.section("dflash_config")
    yield from _corrections(fields, flash, names)
    beside = {
        name
        for name in ("warp_model.bin", "pard_warp_model", "mask_embedding.pt")
        if (folder.path / name).exists()
    }
    is_pard2 = any(key.startswith("pard2_") for key in fields.raw)
    yield (
        is_pard2 or bool({"warp_model.bin", "pard_warp_model"} & beside),
        "PARD-2: a language model that reads the target's features through warp_model",
    )
    yield "mask_embedding.pt" in beside, "mask_embedding.pt: a pickled embedding of the masks"
    if source.kind == P_EAGLE:
        yield from unsupported_layers(fields, source, names)
    else:
        yield fields.get("kv_lora_rank") is not None, "kv_lora_rank: latent attention (MLA)"
        yield any(".experts." in name for name in names), "tensors *.experts.*: experts"
        yield fields.flag("mlp_bias"), "mlp_bias: biases in the MLP"
        is_quantised = fields.get("quantization_config") is not None
        yield is_quantised, "quantization_config: quantised weights"
    yield from _sliding(fields, flash)
    if source.kind == PARD:
        model_type = fields.text("model_type", "llama")
        yield model_type not in PARD_MODELS, f"model_type {model_type!r} of {list(PARD_MODELS)}"
    is_all = flash.flag("use_aux_hidden_state", default=True)
    yield not is_all, "dflash_config.use_aux_hidden_state: false"
    yield flash.flag("causal"), "dflash_config.causal: true"


def _corrections(
    fields: ConfigFields, flash: ConfigFields, names: Collection[str]
) -> Iterator[tuple[bool, str]]:
    """Pairs (condition, message): designs whose draft tokens depend on each other."""
    kind = fields.get("speculators_model_type")
    yield kind == "dflash2", "speculators_model_type 'dflash2': convolutions and a selector"
    projector = flash.text("projector_type", fields.text("projector_type", ""))
    is_domino = projector == "domino" or any(name.startswith("prefix_gru.") for name in names)
    is_domino = is_domino or any(a.startswith("Domino") for a in fields.strings("architectures"))
    yield is_domino, "Domino: a GRU corrects the logits token by token (prefix_gru)"
    rank = fields.get("markov_rank", flash.get("markov_rank", 0 if projector != "dspark" else 1))
    has_markov = rank != 0 or any(name.startswith("markov_head.") for name in names)
    yield (
        has_markov,
        "DSpark's Markov head (markov_rank): logits depend on the token drafted before",
    )


def _sliding(fields: ConfigFields, flash: ConfigFields) -> Iterator[tuple[bool, str]]:
    """Pairs (condition, message): sliding windows."""
    kinds = set(fields.strings("layer_types")) - {"full_attention"}
    yield bool(kinds), f"layer_types {sorted(kinds)}: only full_attention layers"
    for section in (fields, flash):
        for key in ("use_sliding_window", "use_swa", "attention_sink_bias"):
            yield section.flag(key), f"{key}: a draft with sliding windows"


class MaskTokenReading:
    """Reads one configuration, from its producer's terms to `MaskTokenConfig`.

    Args:
        fields: config.json; a speculators file with its layer configuration filled in.
        source: who wrote it.
        tensors: in the file, by the head's names.
        options: of the caller, in the place of what the file holds.

    Attributes:
        tensors: as given, with shapes that differ between producers made equal.
    """

    def __init__(
        self, fields: ConfigFields, source: Source, tensors: Tensors, options: MaskTokenOptions
    ):
        self.fields, self.source, self.options = fields, source, options
        self.tensors, self.notes = dict(tensors), fields.notes
        self.flash = fields.section("dflash_config")

    def p_eagle(self, target: PreTrainedModel | None) -> MaskTokenConfig:
        """An EAGLE-3 head, and what its masks are."""
        fields = self.fields
        producer = {"amazon": "vLLM"}.get(self.source.producer, self.source.producer)
        source = Source(producer, "EAGLE-3", self.source.why)
        reading = EagleReading(fields, source, self.tensors, self.options)
        eagle = reading.config(target)
        if not eagle.has_fc:
            raise ValueError(f"{fields.origin}: a P-EAGLE head joins features through fc")
        check_joined(eagle, fields, self.tensors.get("fc.weight"))
        if eagle.feedback_norm:
            self.notes.append("norm_output has no meaning here: nothing is fed back")
        self._reshape("mask_hidden", (1, 1, eagle.feature_width))
        return MaskTokenConfig(
            **self._design("shifted", "input"),
            layer=eagle.layer,
            vocab_size=eagle.vocab_size,
            draft_vocab_size=eagle.draft_vocab_size,
            feature_layers=eagle.feature_layers,
            target_hidden_size=eagle.target_hidden_size,
            num_layers=eagle.num_layers,
            mask_token_id=self._mask_token(eagle.vocab_size),
            norm_before_fc=eagle.norm_before_fc,
            fc_norm=eagle.fc_norm,
            fc_bias=eagle.fc_bias,
            norm_before_residual=eagle.norm_before_residual,
            output_norm=eagle.output_norm,
            has_embed_tokens=eagle.has_embed_tokens,
            has_lm_head=eagle.has_lm_head,
            logit_scale=eagle.logit_scale,
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
            layer=self._layer(has_output_bias=fields.get("model_type") != "qwen2"),
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
        fields, is_speculators = self.fields, self.source.producer == "speculators"
        self._refuse_options("norm_before_residual")
        layer = self._layer(has_output_bias=True)
        theirs = None
        if self.source.producer == "Hugging Face":
            if target is None:
                raise ValueError(f"{fields.origin} leaves vocab_size to the target: pass one")
            theirs = target.config.get_text_config().vocab_size
        vocab_size = draft_size = fields.integer("vocab_size", theirs)
        if is_speculators:
            draft_size = sizes.read_draft_vocab_size(fields, is_speculators=True)
        target_hidden_size = fields.integer("target_hidden_size", layer.hidden_size)
        num_layers = self._num_target_layers(target)
        if target is not None:
            check_target(target, target_hidden_size, vocab_size, what=fields.origin)
        alignment = "same-position"
        if self.source.kind == DSPARK or self._says("sample_from_anchor"):
            alignment = "next-token"
            self.notes.append("rows predict the token after their own position (next-token)")
        config = MaskTokenConfig(
            **self._design(alignment, "keys"),
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
        )
        check_joined(config, fields, self.tensors.get("fc.weight"))
        return config

    def _design(self, alignment: str, context: str) -> dict:
        """Alignment and context, and whether rows are causal, with the caller's options."""
        given = self.options.get("alignment", alignment)
        is_causal = self.options.get("is_causal", context != "keys")
        for name in ("alignment", "is_causal"):
            if name in self.options:
                self.notes.append(f"as asked for: {name} = {self.options[name]}")
        return {"alignment": given, "context": context, "is_causal": is_causal}

    def _refuse_options(self, *names: str) -> None:
        given = sorted(set(names) & self.options.keys())
        if given:
            raise ValueError(f"{', '.join(given)}: a {self.source.kind} head has none; drop it")

    def _says(self, key: str) -> bool:
        """A flag at the top level or in `dflash_config`."""
        return self.fields.flag(key) or self.flash.flag(key)

    def _mask_token(self, vocab_size: int) -> int | None:
        """The id of masks: the option, the one in the file, or a tensor of the head's instead."""
        fields, flash, options = self.fields, self.flash, self.options
        named = {key: fields.get(key) for key in _MASK_KEYS}
        named["dflash_config.mask_token_id"] = flash.get("mask_token_id")
        named = {key: value for key, value in named.items() if value is not None}
        text = flash.get("mask_token")
        if "mask_token_id" in options:
            self.notes.append(f"as asked for: mask_token_id = {options['mask_token_id']}")
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
        fields = self.fields
        has_bias = fields.flag("attention_bias")
        in_file = "layers.0.self_attn.q_proj.bias" in self.tensors
        layer = sizes.read_layer(
            fields,
            attention_bias=has_bias or (in_file and fields.get("model_type") == "qwen2"),
            attention_output_bias=has_bias and has_output_bias,
            has_qk_norm="layers.0.self_attn.q_norm.weight" in self.tensors
            or fields.get("model_type") == "qwen3",
        )
        return rope.settle_rope(layer, self.options, self.notes)

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
        found = {
            section.integer("block_size", high=_MAX_BLOCK)
            for section in (self.fields, self.flash)
            if section.get("block_size") is not None
        }
        if len(found) > 1:
            raise ValueError(f"{self.fields.origin} names two block sizes: {sorted(found)}")
        if not found and self.source.producer == "speculators":
            self.notes.append("no block_size: 8, speculators' default")
            found.add(8)
        if not found:
            raise ValueError(f"{self.fields.origin} lacks block_size")
        return found.pop()

    def _features(self, num_layers: int | None) -> tuple[FeatureLayer, ...]:
        """The boundaries that the head reads."""
        convention = layer_ids.check_convention(self.options.get("layer_convention"))
        if "feature_layers" in self.options:
            layers = layer_ids.check_boundaries(self.options["feature_layers"], num_layers)
            self.notes.append(f"as asked for: feature_layers = {layers}")
            return layers
        found = [
            LayerIds("target_layer_ids", self.fields.get("target_layer_ids"), "layer_output", -1),
            LayerIds(
                "dflash_config.target_layer_ids", self.flash.get("target_layer_ids"), "layer_output"
            ),
            LayerIds("dflash_config.layer_ids", self.flash.get("layer_ids"), "boundary"),
            LayerIds(
                "aux_hidden_state_layer_ids",
                self.fields.get("aux_hidden_state_layer_ids"),
                "boundary",
            ),
        ]
        found = [entry for entry in found if entry.ids is not None]
        if found:
            given = {"producer": self.source.producer, "convention": convention}
            return layer_ids.read_layer_ids(found, self.fields, num_layers, **given)
        if self.source.producer == "speculators" or num_layers is None:
            raise ValueError(
                f"{self.fields.origin} names no layers of features; pass feature_layers=(...) with "
                "the boundaries that are meant"
            )
        key = "num_hidden_layers"
        if self.fields.get("target_num_hidden_layers") is not None:
            key = "num_target_layers"
        layers = layer_ids.evenly_spaced(self.fields.integer(key, 1, high=64), num_layers)
        self.notes.append(f"no layer ids: {key}, evenly spaced: boundaries {list(layers)}")
        return layer_ids.check_boundaries(layers, num_layers)

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
        for name, count in (
            ("embed_tokens.weight", vocab_size),
            ("lm_head.weight", min(own_size, vocab_size)),
        ):
            stored = self.tensors.get(name)
            if stored is not None and stored.shape[:1] == (own_size,):
                self.tensors[name] = _with_rows(stored, count)
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


def describe(config: MaskTokenConfig) -> list[tuple[str, str]]:
    """Lines (name, text)."""
    kind = {"input": P_EAGLE, "none": PARD}.get(config.context, DFLASH)
    layer = sizes.describe_layer(config.layer, config.num_layers)
    masks = f"token {config.mask_token_id}"
    if config.mask_token_id is None:
        masks = "a learned embedding"
    if config.context == "input":
        masks += " and a learned feature"
    after_fc = ["after fc"] if config.context == "keys" else []
    lines = [
        ("head", f"{kind}, {layer['sizes']}"),
        ("rows", f"{_ROWS[config.alignment]}; {'causal' if config.is_causal else 'bidirectional'}"),
        ("masks", masks),
        ("features", _describe_features(config)),
        ("norms", sizes.describe_norms(config, config.context == "input", *after_fc)),
        ("attention", layer["attention"]),
        ("rope", layer["rope"]),
    ]
    if config.block_size is not None:
        drafts = f"at most {config.max_draft_tokens} draft tokens"
        lines.insert(3, ("block", f"{config.block_size} rows, {drafts}"))
    if config.max_positions is not None:
        lines.append(("positions", f"{config.max_positions}"))
    return lines


_ROWS = {
    "shifted": "shifted: row t is token t + 1 beside feature t and predicts token t + 2",
    "unshifted": "unshifted: row t is token t and predicts token t + 1",
    "same-position": "same position: block row j at n + j predicts the token there, j >= 1",
    "next-token": "next token: block row j at n + j predicts the token after it",
}


def _describe_features(config: MaskTokenConfig) -> str:
    if config.context == "none":
        return "none: a language model of its own"
    names = f"boundaries {', '.join(map(str, config.feature_layers))}"
    how = "beside the embedding" if config.context == "input" else "as keys and values"
    return f"{names}, {config.target_hidden_size} wide, joined by fc, {how}"


def misreadings(config: MaskTokenConfig, target: PreTrainedModel) -> Iterator[Misreading]:
    """Layers off by one, what a row predicts and what it sees, norms, the base of the rope."""
    text = target.config.get_text_config()
    if config.feature_layers:
        others = layer_ids.other_boundaries(config.feature_layers, text.num_hidden_layers)
        for name, layers in others:
            yield misread(config, name, feature_layers=layers)
    if config.context == "keys":
        changed = "next-token" if config.alignment == "same-position" else "same-position"
        if config.block_size is None or config.block_size > 1:
            name = f"rows predict {changed.replace('-', ' ')}"
            yield misread(config, name, alignment=changed)
        if config.block_size is not None:
            value = not config.is_causal
            name = "causal block" if value else "bidirectional block"
            yield misread(config, name, is_causal=value)
    if config.context == "input":
        value = not config.norm_before_residual
        name = f"residual {'after' if value else 'before'} the norm"
        yield misread(config, name, norm_before_residual=value)
    yield from rope.misread_bases(config, target)


MASK_TOKEN = Family(
    name="mask token",
    marks="keys ptd_token_id, pard_token, dflash_config, or tensor mask_hidden",
    detect=detect,
    translate=translate,
    head=MaskTokenHead,
    describe=describe,
    misreadings=misreadings,
    options=hints_of(MaskTokenOptions),
)
"""P-EAGLE, PARD and DFlash."""
