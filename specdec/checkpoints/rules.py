"""Values of a head's fields that no single key says: what follows from several keys, from tensors,
from the target, or from what a producer takes for granted. Each is a function of a `Reading`.
"""

from __future__ import annotations

import re

import torch

from specdec.arguments import check_choice
from specdec.checkpoints.files import StoredTensor
from specdec.checkpoints.layer_ids import NAME_THEM, check_layers, evenly_spaced
from specdec.checkpoints.layers import read_layer, with_layer, with_theta
from specdec.checkpoints.layout import Key, Pairs, Reading, Rule, Tensors
from specdec.drafters.head.layer_config import LayerConfig
from specdec.drafters.head.rotary import INTERLEAVED, SECTIONS
from specdec.drafters.head.sharing import check_target
from specdec.targets.target import MAX_VOCAB_PADDING
from specdec.types import FeatureLayer


def layer(reading: Reading) -> LayerConfig:
    """The decoder layers, with what the caller asks for instead."""
    options, own = reading.options, "layer."
    names = [name for name in reading.layout.fields if name.startswith(own)]
    flags = {name.removeprefix(own): reading[name] for name in names}
    is_causal = flags.get("is_window_causal", True) or not flags.get("windows")
    found = read_layer(reading.fields, **flags | {"is_window_causal": is_causal})
    if "rope_theta" in options:
        found = with_theta(found, options["rope_theta"])
    return with_layer(found, options["layer"]) if "layer" in options else found


def layer_of_angelslim(reading: Reading) -> LayerConfig:
    """Its rope of three axes is always interleaved, whatever the configuration says
    (`train/models/draft/llama_eagle3.py`, `MRotaryEmbedding`).
    """
    found, asked = layer(reading), reading.options.get("layer", {})
    if SECTIONS not in found.rope or found.rope.get(INTERLEAVED) or "rope" in asked:
        return found
    reading.notes.append(
        "AngelSlim's trainer interleaves mrope_section in Qwen2.5-VL heads, too; engines that read "
        "the configuration by the letter do not"
    )
    return with_layer(found, {"rope": found.rope | {INTERLEAVED: True}})


def has_qk_norm(reading: Reading) -> bool:
    """Qwen3's layers; a norm of queries in the file also says that there is one."""
    is_qwen3 = reading.fields.get("model_type") == "qwen3"
    return is_qwen3 or "layers.0.self_attn.q_norm.weight" in reading.tensors


def windows(reading: Reading) -> tuple[int | None, ...]:
    """`LayerConfig.windows`: from `layer_types` and `sliding_window`, or of z-lab's `use_swa` and
    `swa_window_size`, which stand for all layers where `layer_types` names none.
    """
    fields, flash = reading.fields, reading.flash
    count = fields.integer("num_hidden_layers", 1)
    types = fields.strings("layer_types")
    if others := set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"{fields.origin}: not supported: layer_types {sorted(others)}")
    if types and len(types) < count:
        raise ValueError(f"{fields.origin}: layer_types names {len(types)} of {count} layers")
    slides = [name == "sliding_attention" for name in types[:count]] or [False] * count
    if fields.flag("use_sliding_window") and not types:
        raise ValueError(f"{fields.origin}: use_sliding_window needs layer_types, which says where")
    if flash.flag("use_swa") and not any(slides):
        slides = [True] * count
    if not any(slides):
        return ()
    size = flash.get("swa_window_size")
    if size is None and fields.get("use_sliding_window") is False:
        # HF's Qwen3Config drops sliding_window then. z-lab's layers go on without a window, vLLM's
        # raise an error: a file that means either says so without a contradiction.
        raise ValueError(
            f"{fields.origin} contradicts itself: layers slide (layer_types or use_swa), and "
            "use_sliding_window is false; set it to true, or name full_attention in layer_types"
        )
    size = fields.get("sliding_window") if size is None else size
    if type(size) is not int or size < 1:
        raise ValueError(
            f"{fields.origin}: sliding layers need sliding_window, a number of positions, got "
            f"{size!r}"
        )
    return tuple(size if slide else None for slide in slides)


def longer_windows(reading: Reading) -> tuple[int | None, ...]:
    """Of HF's DFlash, whose masks of both directions reach one further."""
    return tuple(window and window + 1 for window in windows(reading))


def vocab_size_of_target(reading: Reading) -> int:
    """V, of a file that leaves it to the target."""
    fields = reading.fields
    if reading.target is None:
        raise ValueError(f"{fields.origin} leaves vocab_size to the target: pass one")
    return fields.integer("vocab_size", reading.text.vocab_size)


def fitted_vocab_size(reading: Reading) -> int:
    """V of the target, from which a language model's may differ by padding: its tables are cut or
    padded.
    """
    own_size = reading.fields.integer("vocab_size")
    size = own_size if reading.target is None else reading.text.vocab_size
    if own_size == size:
        return size
    if abs(own_size - size) > MAX_VOCAB_PADDING:
        raise ValueError(
            f"{reading.fields.origin} has a vocabulary of {own_size} and the target's is {size}; "
            f"they must share a tokenizer (a difference of up to {MAX_VOCAB_PADDING} is taken for "
            "padding)"
        )
    reading.notes.append(
        f"a vocabulary of {own_size} for a target's of {size}: padding, cut or left out"
    )
    return size


class FirstIds(Rule):
    """A language model of the first ids of its target has no map of them in its files."""

    def read(self, tensors: Tensors, reading: Reading) -> Tensors:
        """See `Rule`."""
        count = reading["draft_vocab_size"]
        if count == reading["vocab_size"]:
            return tensors
        zeros = torch.zeros(count, dtype=torch.int64, device="cpu")
        return tensors | {"d2t": StoredTensor("d2t", "I64", (count,), lambda: zeros)}


def draft_vocab_size(reading: Reading, usual: int | None = None, why: str = "") -> int:
    """Vd; `usual` is what an absent key means if not the full vocabulary, and `why` the reason."""
    fields, names = reading.fields, ("draft_vocab_size", "truncated_vocab_size")
    limit = size = fields.integer("vocab_size")
    sizes = {fields.integer(name) for name in names if fields.get(name) is not None}
    if len(sizes) > 1:
        raise ValueError(f"{fields.origin}: {' and '.join(names)} differ: {sorted(sizes)}")
    if sizes:
        size = sizes.pop()
    elif usual is not None and names[0] not in fields.raw:
        size = usual
        reading.notes.append(f"no draft_vocab_size: {usual}, {why}")
    else:
        reading.notes.append("no draft_vocab_size: the full vocabulary")
    if size > limit:
        raise ValueError(
            f"{fields.origin}: {size} draft ids are more than the vocabulary's {limit}"
        )
    return size


def draft_vocab_size_of_blocks(reading: Reading) -> int:
    """Vd of a block head, few of which name it (SpecForge's DSpark)."""
    if reading.fields.get("draft_vocab_size") is None:
        return reading["vocab_size"]
    return draft_vocab_size(reading)


def target_hidden_size(reading: Reading) -> int:
    """Width of a feature, that of the head by default."""
    size = reading.fields.integer("target_hidden_size", reading.hidden_size)
    if reading.target is not None:
        names = size, reading["vocab_size"]
        check_target(reading.target, *names, what=reading.fields.origin)
    return size


def num_layers_of_eagle(reading: Reading) -> int:
    """Layers of the head; with a midlayer some configurations have the target's number instead."""
    if any("midlayer." in stored.name for stored in reading.tensors.values()):
        return num_layers_in_file(reading)
    return reading.fields.integer("num_hidden_layers", 1)


def num_layers_in_file(reading: Reading) -> int:
    """One where the file has no second, whatever the configuration says."""
    if any(name.startswith("layers.1.") for name in reading.tensors):
        return reading.fields.integer("num_hidden_layers", 1)
    said = reading.fields.integer("num_hidden_layers", 1, high=4096)
    if said > 1:
        reading.notes.append(f"num_hidden_layers {said} is the target's: the file has one")
    return 1


# EAGLE.

_NORM_OF_SPECFORGE = Key(
    "norm_output",
    True,
    present="norm_output is taken as SpecForge's: the norm before the vocabulary head; raw "
    "feedback (vLLM and SGLang would take it for normalised feedback)",
)


def output_norm_of_specforge(reading: Reading) -> bool:
    """Its `norm_output`; the weights of a norm that is not used may be in the file."""
    has_norm = _NORM_OF_SPECFORGE.value(reading)
    if not has_norm:
        why = "norm_output is false: no norm before the vocabulary head"
        reading.unused["norm.weight"] = why
    return has_norm


def eagle1_bias(reading: Reading) -> bool:
    """SafeAILab's reference takes an absent key for true; a file that holds none can only mean
    false.
    """
    has_bias = reading.fields.flag("bias", default="fc.bias" in reading.tensors)
    if reading.fields.get("bias") is None:
        word = "a" if has_bias else "no"
        reading.notes.append(f"no key bias: fc has {word} bias, as the file")
    return has_bias


def final_feature(reading: Reading) -> tuple[FeatureLayer, ...]:
    """EAGLE-1's feature; a file that asks for what only EAGLE-3 has contradicts itself."""
    fields = reading.fields
    norms = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    said = [f"{name} is set" for name in norms if fields.flag(name)]
    said += [f"{entry.key} is {str(entry.ids)[:80]}" for entry in reading.layer_ids()]
    if said:
        raise ValueError(
            f"{fields.origin}: {said[0]}, but the tensors are those of an EAGLE-1 head, which "
            "reads the final state"
        )
    return _one_feature(reading)


def _one_feature(reading: Reading) -> tuple[FeatureLayer, ...]:
    asked = reading.asked_layers(reading.num_target_layers)
    if asked and len(asked) != 1:
        raise ValueError(f"the head reads one feature, got feature_layers {list(asked)}")
    return asked or ("final",)


def joins_features(reading: Reading) -> bool:
    """NVIDIA's `use_aux_hidden_state`; without it ids have no meaning."""
    joins = reading.fields.section("eagle_config").flag("use_aux_hidden_state", default=True)
    if not joins:
        note = "use_aux_hidden_state is false: the final state is the feature, no fc"
        unmeant = [entry for entry in reading.layer_ids() if entry.ids]
        said = [f"so {entry.key} {str(entry.ids)[:80]} has no meaning" for entry in unmeant]
        reading.notes.extend([note, *said])
    return joins


def eagle_features(reading: Reading, convention_of: str = "") -> tuple[FeatureLayer, ...]:
    """The hidden states that an EAGLE-3 head reads; or the final state alone."""
    if not reading["has_fc"]:
        return _one_feature(reading)
    count = reading.num_target_layers
    asked = reading.asked_layers(count)
    return asked or reading.hidden_states(reading.layer_ids(), count, convention_of)


def features_of_nvidia(reading: Reading) -> tuple[FeatureLayer, ...]:
    """Its exporter writes ids, and its training routes differ in what they mean."""
    layers, is_asked = eagle_features(reading), "feature_layers" in reading.options
    if is_asked or not reading["has_fc"]:
        return layers
    if not reading.layer_ids():
        reading.notes.append(
            "NVIDIA's exporter writes the ids, so the defaults are a guess here "
            "(vllm-project/vllm#50170 measured 1 % acceptance on such a head)"
        )
    elif "layer_convention" not in reading.options:
        reading.notes.append(
            "NVIDIA's training routes differ: compare with layer_convention='layer_output'"
        )
    return layers


def features_of_deepspec(reading: Reading) -> tuple[FeatureLayer, ...]:
    """Its trainer reads HF's hidden states, of which the last is normed."""
    layers, is_asked = eagle_features(reading), "feature_layers" in reading.options
    count = reading.num_target_layers
    if reading["has_fc"] and not is_asked and layers[-1] == count:
        reading.notes.append(
            f"DeepSpec's trainer sees {count} after the final norm: compare with 'final'"
        )
    return layers


def joined_input(reading: Reading) -> str:
    """P-EAGLE's way of features into the head: through `fc`; masks have one of their own."""
    if not reading["has_fc"]:
        raise ValueError(f"{reading.fields.origin}: a P-EAGLE head joins features through fc")
    if reading["feedback_norm"]:
        reading.notes.append("norm_output has no meaning here: nothing is fed back")
    return "input"


_EAGLES = (
    r"(CosyVoice3)?Eagle3LlamaForCausalLM|LlamaForCausalLMEagle3?|Qwen2ForCausalLMEagle"
    r"|(P?Eagle3?|LlamaEagle3)DraftModel|P?Eagle3?Speculator|LlamaDecoderLayer|Qwen3Eagle3Model"
    r"|(Eagle|Peagle)3?(Llama|Qwen[\d_]*(vl|VL)?|MiniMaxM2)(ForCausalLM|Model)"
    r"|(Llama|Mi[sx]tral|Qwen[\dA-Za-z_]*|Phi3)For(CausalLM|ConditionalGeneration)"  # its target's
)
_LAYERS_OF_EAGLE = r"llama|mi[sx]tral|qwen\w*|phi3|minimax\w*|p?eagle\w*|speculator_model"


def other_eagles(reading: Reading) -> Pairs:
    """EAGLE heads of names whose layers are not known."""
    fields, kind = reading.fields, reading.fields.text("model_type", "llama")
    yield from _other_names(fields.strings("architectures"), _EAGLES, "LlamaForCausalLMEagle3")
    is_known = re.fullmatch(_LAYERS_OF_EAGLE, kind)
    yield not is_known, f"model_type {kind!r}, of whose EAGLE heads no wiring is known here"


def _other_names(names: list[str], known: str, usual: str) -> Pairs:
    others = [name for name in names if not re.fullmatch(known, name)]
    what = f"architectures {others}, of which no wiring is known here; if their layers are those of"
    yield bool(others), f"{what} a {usual}, write so into config.json"


# Masks and blocks.


def files_beside(reading: Reading) -> Pairs:
    """Files that a mask-token head cannot have beside it."""
    is_pard2 = bool({"warp_model.bin", "pard_warp_model"} & reading.beside)
    yield is_pard2, "PARD-2: a language model that reads the target's features through warp_model"
    is_pickled = "mask_embedding.pt" in reading.beside
    yield is_pickled, "mask_embedding.pt: a pickled embedding of the masks"


def other_language_models(reading: Reading) -> Pairs:
    """Language models of other layers."""
    kind, known = reading.fields.text("model_type", "llama"), ("llama", "qwen2", "qwen3")
    yield kind not in known, f"model_type {kind!r} of {list(known)}"


_BLOCKS = (
    r"(Qwen[\d_]*(Omni)?)?(DFlash2?|DSpark|Domino|XPress|LiLiCorr)((Draft)?Model|Speculator)"
    r"|JetSpecDraftModel|DFlash(Qwen3|Llama)ForCausalLM|(DFlash)?MuseGlimmerAssistantModel"
    r"|Qwen3ForCausalLM"  # whose layers they have
)
_LAYERS = {
    *("llama", "qwen2", "qwen3", "dflash", "dflash2", "qwen3_dflash", "dspark"),
    *("muse_glimmer_assistant", "speculator_model", "eagle"),
}


def other_blocks(reading: Reading) -> Pairs:
    """Block heads of names whose layers are not known, and what readers disagree about."""
    fields, options = reading.fields, reading.options
    yield from _other_names(fields.strings("architectures"), _BLOCKS, "DFlashDraftModel")
    kind = fields.text("model_type", "qwen3")
    yield kind not in _LAYERS, f"model_type {kind!r}, of whose block heads no wiring is known here"
    places = fields, *map(fields.section, ("rope_parameters", "rope_scaling"))
    has_base = any(place.raw.get("rope_theta") is not None for place in places)
    has_base = has_base or not options.keys().isdisjoint(("rope_theta", "layer"))
    yield not has_base, "no rope_theta, which vLLM takes for 1e6 and HF for 1e4; pass rope_theta="


_JETSPEC = "JetSpecDraftModel"


def said_causal(reading: Reading) -> bool | None:
    """Whether each row of a block sees only those before it, in z-lab's words or JetSpec's
    (hao-ai-lab/JetSpec, `models/draft_head.py`); `None` where a file does not say.
    """
    fields, kinds = reading.fields, ("bidirectional", "causal")
    said = {}
    if reading.either.get("is_causal") is not None:
        said["is_causal"] = reading.either.flag("is_causal")
    if reading.flash.get("causal_head") is not None:
        said["causal_head"] = reading.flash.flag("causal_head")
    if (kind := fields.get("head_type")) is not None:
        check_choice(f"{fields.origin}: head_type", kind, kinds)
        said["head_type"] = kind == kinds[1]
    if _JETSPEC in fields.strings("architectures"):
        said[f"architecture {_JETSPEC}"] = True
    if len({*said.values()}) > 1:
        raise ValueError(f"{fields.origin} says two things of whether blocks are causal: {said}")
    return next(iter(said.values()), None)


_MASK_KEYS = (
    *("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"),
    "dflash_config.mask_token_id",
)


def mask_token(reading: Reading) -> int | None:
    """The id of masks: the option, the one in the file, or a tensor of the head's instead."""
    fields, flash, options = reading.fields, reading.flash, reading.options
    size = reading["vocab_size"]
    limit = min(size, fields.integer("vocab_size", size))
    own = reading.layout.fields["mask_token_id"].name
    places = {key: fields.at(key) for key in (*_MASK_KEYS, own)}
    named = {key: place.get(name) for key, (place, name) in places.items()}
    named = {key: value for key, value in named.items() if value is not None}
    text = flash.get("mask_token")
    if "mask_token_id" in options:
        named = {"mask_token_id (asked for)": options["mask_token_id"]}
    elif "mask_embedding" in reading.tensors and not named:
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
    if type(token) is not int or not 0 <= token < limit:
        raise ValueError(
            f"{fields.origin}: {key} must be an id in 0..{limit - 1}, got {str(token)[:40]}"
        )
    return token


def confidence(reading: Reading) -> str | None:
    """What the confidence head reads, by the width of its weights."""
    stored = reading.tensors.get("confidence_head.weight")
    if stored is None or len(stored.shape) != 2:
        return None
    return "hidden" if stored.shape[1] == reading.hidden_size else "markov"


def width_of_block_features(reading: Reading) -> int:
    """`target_hidden_size`; the target must have as many layers as are named, too."""
    num_target_layers(reading)
    return target_hidden_size(reading)


def num_target_layers(reading: Reading) -> int | None:
    """N, which the configuration may name as well."""
    # TorchSpec's num_target_layers is the number of features.
    fields, key = reading.fields, "target_num_hidden_layers"
    key = key if fields.get(key) is not None else "num_target_layers"
    named = fields.get(key)
    if named is not None:
        named = fields.integer(key, high=4096)
    if reading.target is None:
        return named
    count = reading.text.num_hidden_layers
    if named not in (None, count):
        raise ValueError(
            f"{fields.origin} was made for a target of {named} layers, but "
            f"{type(reading.target).__name__} has {count}"
        )
    return count


def block_features(reading: Reading, *, must_name_them: bool = False) -> tuple[FeatureLayer, ...]:
    """The hidden states that a block head reads; evenly spaced where a file need not name them."""
    if reading["alignment"] == "next-token":
        reading.notes.append("rows predict the token after their own position (next-token)")
    fields, count = reading.fields, num_target_layers(reading)
    asked = reading.asked_layers(count)
    if asked is not None:
        return asked
    if found := reading.layer_ids():
        return reading.hidden_states(found, count)
    if must_name_them or count is None:
        raise ValueError(f"{fields.origin} names no layers of features; {NAME_THEM}")
    key = "num_hidden_layers"
    if fields.get("target_num_hidden_layers") is not None:
        key = "num_target_layers"
    layers = evenly_spaced(fields.integer(key, 1, high=64), count)
    reading.notes.append(f"no layer ids: {key}, evenly spaced: hidden states {list(layers)}")
    return check_layers("feature_layers", layers, count)
