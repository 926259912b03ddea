"""Writes heads in the layouts that other engines read.

A layout is written exactly: what it has no key or no tensor for is refused, since a file that
another engine misreads is worse than none. What only some of its readers misread is noted.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from specdec.arguments import check_choice, check_path, shown
from specdec.atomic import replacing, replacing_files, write_text
from specdec.checkpoints.file_parts import SCALINGS
from specdec.checkpoints.head_layouts import LAYOUTS
from specdec.checkpoints.layout import HeadLayout, Written
from specdec.checkpoints.tensor_names import stored
from specdec.checkpoints.vocab_map import write_vocab_map
from specdec.drafters.head.config import HeadConfig
from specdec.drafters.head.features import FeatureHead, FeatureHeadConfig
from specdec.drafters.head.layers import LayerConfig
from specdec.show.text import printable

Layout = Literal["safeailab", "speculators", "vllm", "huggingface", "z-lab"]


def save_head(
    head: FeatureHead,
    folder: str | Path,
    layout: Layout | HeadLayout | None = None,
    *,
    embed_tokens: Tensor,
    lm_head: Tensor,
    num_draft_tokens: int = 4,
    verifier: str | None = None,
    target_layers: int | None = None,
) -> tuple[str, ...]:
    """Writes `config.json` and `model.safetensors` of an EAGLE or a mask-token head.

    `"safeailab"` is the layout of yuhuili's heads (EAGLE-1: `layers.0.*`; EAGLE-3: `midlayer.*`),
    which SafeAILab's own code, vLLM and SGLang read (vLLM without a bias in EAGLE-1's `fc`).
    `"speculators"` is that of RedHatAI's, read by vLLM: `eagle3`, with keys for the norms that
    distinguish the newer dialects and for several layers; `peagle`, `dflash`, and by a head's
    correction `dspark` (also without one, for rows that predict the next token), `dflash2` or
    `xpress`. A `peagle` file of a head with a Markov correction has its keys and tensors under
    DSpark's names, which this library alone reads. `"vllm"` is that of amazon's P-EAGLE
    heads: EAGLE-3's with `ptd_token_id`. `"huggingface"` is a causal language model with
    `pard_token`, as AMD's PARD models. `"z-lab"` is that of the public DFlash heads,
    and of SpecForge's DSpark and Domino.
    EAGLE-3's layers of features are written for both of the conventions in use.

    speculators reads a file without embeddings into memory that nobody has written, and without a
    verifier asks the hub for "None"; so its files always have both.

    Args:
        head: the weights.
        folder: made if need be; files in it are replaced.
        layout: `None` is the usual one of the head's design, the first of `layouts_of`. A record of
            your own is written as it says.
        embed_tokens: `[V, H]`, the target's embeddings, written for a head without its own where
            the layout has them (a speculators file, a language model).
        lm_head: `[V, H]`, the target's vocabulary head, written for a head without one of its own
            where engines expect one in the file (EAGLE-3, P-EAGLE, PARD).
        num_draft_tokens: what a speculators file proposes to draft per step. The proposal for a
            block is all of it: the rows see each other, and vLLM's blocks have 1 + K of them.
        verifier: Hugging Face id or folder of the target, for a speculators file.
        target_layers: decoder layers N of the target, from which EAGLE-3's usual features follow.

    Returns:
        What some of the layout's readers do not understand, one line each.

    Raises:
        ValueError: an unknown layout, a head that the layout cannot express, or a speculators file
            without a verifier or embeddings. Nothing has been written then.
    """
    config, design = head.config, getattr(head.config, "fusion", None) or head.config.alignment
    record, name = layout, getattr(layout, "name", None)
    if name is None:
        names = layouts_of(design)
        name = names[0] if layout is None else layout
        check_choice(f"layout of {design!r} heads", name, names)
        record = _record(config, design, name)
    if obstacles := sorted(_obstacles(config, record)):
        other = " (layout='speculators' may)" if name == "safeailab" else ""
        raise ValueError(f"the {name} layout cannot express {', '.join(obstacles)}{other}")
    tensors = dict(head.state_dict())
    if "lm_head" in record.copies and not config.has_lm_head:
        tensors["lm_head.weight"] = lm_head.to(head.dtype)
    if "embed_tokens" in record.copies and not config.has_embed_tokens:
        table = _plain_table(embed_tokens, config)
        is_masked_text = design in ("shifted", "unshifted")
        tensors["embed_tokens.weight"] = table.to(head.dtype) if is_masked_text else table
    if head.target_ids is not None:
        tensors = _with_vocab_map(tensors, head.target_ids, config.vocab_size)
    num_draft_tokens = getattr(config, "max_draft_tokens", None) or num_draft_tokens
    dtype = str(head.dtype).removeprefix("torch.")
    keys = _keys(record, Written(config, dtype, num_draft_tokens, verifier))
    correction = getattr(config, "correction", None)
    tensors = {stored(name, record.tensors, correction): x for name, x in tensors.items()}
    if record.prefix:
        is_bare = "lm_head.weight"
        tensors = {n if n == is_bare else record.prefix + n: x for n, x in tensors.items()}
    write_checkpoint(folder, keys, tensors)
    return tuple(_notes(config, target_layers)) if name == "safeailab" else ()


def layouts_of(design: str) -> tuple[Layout, ...]:
    """Layouts that exist for a design of heads, the usual one first: the fusion of EAGLE heads, the
    alignment of mask-token heads.

    Example:
        >>> layouts_of("same-position")
        ('z-lab', 'speculators')
    """
    written = (layout for layout in LAYOUTS if layout.name and design in layout.designs)
    return tuple(dict.fromkeys(layout.name for layout in written))


def _record(config: FeatureHeadConfig, design: str, name: str) -> HeadLayout:
    """The record of the head's kind; the first one of that name where none has its correction,
    which is among the obstacles then.
    """
    found = [x for x in LAYOUTS if x.name == name and design in x.designs]
    kind = type(getattr(config, "correction", None))
    return next((layout for layout in found if kind in layout.corrections), found[0])


def _keys(layout: HeadLayout, what: Written) -> dict[str, Any]:
    """What config.json has, in the layout's order."""
    config, keys = what.config, {}
    boundaries, entries = config.feature_layers, layout.keys | layout.of_layer
    for entry in layout.file:
        if isinstance(entry, tuple):
            found = dict([entry])
        elif callable(entry):
            found = entry(what)
        elif entry in layout.ids:
            shift = layout.ids[entry][0] == "layer_output"
            found = {entry: [boundary - shift for boundary in boundaries]}
        else:
            value = getattr(config if hasattr(config, entry) else config.layer, entry)
            found = entries[entry].keys(config, value)
        for key, value in found.items():
            section, _, key = key.rpartition(".")
            place = keys.setdefault(section, {}) if section else keys
            place[key] = value
    return keys


_FLAGS = {
    *("attention_bias", "attention_output_bias", "has_qk_norm", "has_sinks"),
    *("windows", "is_window_causal", "convolution"),
}
"""Fields of layers that not every layout has a key for."""


def _obstacles(config: FeatureHeadConfig, layout: HeadLayout) -> Iterator[str]:
    """What a layout cannot express: fields that it has no key for, unless their value is what an
    absent key means; and what is no field by itself.
    """
    design = getattr(config, "fusion", None) or config.alignment
    if design not in layout.designs:
        yield f"{design!r} heads"
        return
    values = vars(config) | vars(config.layer)
    usual = {entry.name: entry.default for entry in fields(config) if entry.default is not MISSING}
    usual |= {f.name: f.default for f in fields(LayerConfig) if f.name in _FLAGS}
    usual |= {name: x for name, x in layout.without_keys().items() if name in usual}
    for name in usual.keys() - {*layout.file, *layout.says}:
        if values[name] != usual[name]:
            yield f"{name}={values[name]}"
    layers = [boundary for boundary in config.feature_layers if boundary != "final"]
    if written := [layout.ids[key] for key in layout.file if key in layout.ids]:
        least = max(least + (kind == "layer_output") for kind, least in written)
        yield from _true(
            (len(layers) < len(config.feature_layers), "final features"),
            (layers != sorted(layers), "features that are not in the order of layers"),
            (min(layers, default=least) < least, "features of the embeddings"),
        )
    yield from _true(
        (not written and bool(layers), "other features than the final ones"),
        (getattr(config, "mask_token_id", ...) is None, "a mask without an id"),
        (len(set(config.layer.windows) - {None}) > 1, "windows of several sizes"),
        *(pair for limit in layout.limits for pair in limit(config)),
    )


def _true(*pairs: tuple[bool, str]) -> Iterator[str]:
    """The texts of pairs (condition, text) that hold."""
    return (text for is_so, text in pairs if is_so)


def write_checkpoint(folder: str | Path, keys: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes `config.json` and `model.safetensors` into a folder, which is made if need be. A head
    of the same tensors in it is replaced; another model in it, a target perhaps, is a `ValueError`.
    """
    folder = check_path("folder", folder, what="a folder")
    refuse_another_model(folder, tensors.keys())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"folder {folder} cannot be made: {error.strerror}") from error
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(keys | {"producer": "specdec"}, indent=2)
    with replacing_files(folder) as new:
        with replacing(new / "model.safetensors") as file:
            file.write(save(tensors, metadata={"format": "pt"}))
        write_text(new / "config.json", f"{text}\n")


def refuse_another_model(folder: Path, names: Collection[str] = ()) -> None:
    """`ValueError` if a folder holds a model, other than one of tensors of these names."""
    file, found = folder / "model.safetensors", None
    if file.exists():
        try:
            with safe_open(file, framework="pt") as stored:
                found = set(stored.keys())
        except Exception:  # no safetensors file, or a damaged one
            found = {"a file that cannot be read"}
    elif any(any(folder.glob(kind)) for kind in ("*.safetensors*", "pytorch_model*")):
        found = {"a model in other files"}
    if found is not None and found != set(names):
        others = ", ".join(sorted(map(printable, found - set(names)))[:3]) or "fewer tensors"
        raise ValueError(
            f"{folder} holds another model ({others}), which would be lost; choose a new folder, "
            "or delete it first"
        )


def _plain_table(embeddings: Tensor | None, config: HeadConfig) -> Tensor:
    """The target's embeddings in their own type; `ValueError` if they cannot be copied."""
    shape = [config.vocab_size, config.hidden_size]
    if embeddings is None or not embeddings.is_floating_point() or list(embeddings.shape) != shape:
        raise ValueError(
            f"the head uses the target's embeddings, and such a file holds them: pass them as "
            f"embed_tokens, {shape} floats, got {shown(embeddings)}"
        )
    return embeddings


def _with_vocab_map(
    tensors: dict[str, Tensor], target_ids: Tensor, vocab_size: int
) -> dict[str, Tensor]:
    """A head's tensors with `d2t` and `t2d`, and its draft ids in ascending order: engines that
    read `t2d` take them so.
    """
    if len(target_ids) == vocab_size:
        raise ValueError("no layout can express a permuted full vocabulary")
    order = target_ids.argsort()
    d2t, t2d = write_vocab_map(target_ids[order], vocab_size)
    ours = ("markov_w2", "embed_proj.2", "readout")  # what corrections have of the draft ids
    names = tensors.keys() & {"lm_head.weight", *(f"correction.{name}.weight" for name in ours)}
    return {**tensors, **{name: tensors[name][order] for name in names}, "d2t": d2t, "t2d": t2d}


def _notes(config: FeatureHeadConfig, target_layers: int | None) -> Iterator[str]:
    """What SafeAILab's own code does not read of its layout, while vLLM and SGLang do."""
    layer, rope = config.layer, config.layer.rope
    kind, base = rope["rope_type"], rope["rope_theta"]
    if kind not in ("default", *SCALINGS):
        yield f"SafeAILab's own code cannot load rope_scaling of type {kind!r}"
    if kind in SCALINGS and base != 10000:
        yield f"SafeAILab's own code takes a rope base of 10000 with scaling, not {base:g}"
    if layer.head_dim * layer.num_heads != layer.hidden_size:
        yield f"SafeAILab's older code takes hidden_size / heads for head_dim, not {layer.head_dim}"
    n, layers = target_layers, list(config.feature_layers)
    if config.fusion == "attention" and n is not None and layers != [2, n // 2, n - 3]:
        yield f"SafeAILab's own code always reads boundaries {[2, n // 2, n - 3]}, not {layers}"
