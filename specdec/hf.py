"""What specdec takes from `transformers` beside its documented interface: names that a release may
change. Read in the versions of `TRIED`; `tests/targets/test_hf_names.py` compares them with the
installed version and names what is new there.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import (
    AttentionMaskInterface,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.generation import logits_process

from specdec.graphs.tree import modules_of

TRIED = "5.17.0", "5.24.0"
"""The oldest and the newest version that the tests have passed on."""

CACHES = "cache", "past_key_values", "cache_params"
"""Names of a forward's argument for its cache: from 5.24 on, before, and of purely recurrent models
before.
"""


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which a model's forward takes its cache.

    Raises:
        ValueError: it has none of the names that are known.
    """
    # Of the class: an instance's forward may have been replaced by a function of any arguments.
    parameters = inspect.signature(type(model).forward).parameters
    for name in CACHES:
        if name in parameters:
            return name
    raise ValueError(
        f"{type(model).__name__} cannot be decoded: its forward has no argument for HF's cache "
        f"({', '.join(CACHES)}){newer_than_tried()}. Use HF generate for this model"
    )


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether a model's forward can be told where tokens stand."""
    return "position_ids" in inspect.signature(type(model).forward).parameters


_CONTROLS = {
    *("input_ids", "attention_mask", "position_ids", "cache_position", "labels", "self"),
    *("args", "kwargs"),
    *("use_cache", "logits_to_keep", "return_dict", "head_mask", "num_logits_to_keep"),
    *("next_sequence_length", "is_first_iteration", "output_router_logits", *CACHES),
}
_TEXT_INPUTS = {"inputs_embeds", "token_type_ids"}


def prompt_inputs(model: PreTrainedModel) -> set[str]:
    """Names of what a model's `generate` takes of a prompt beside ids and mask: pictures, sound,
    embeddings. Types of tokens are among them where there is more than one modality.
    """
    kind = type(model)
    taken = inspect.signature(kind.prepare_inputs_for_generation).parameters.keys()
    taken |= inspect.signature(kind.forward).parameters.keys()
    found = {
        name
        for name in taken - _CONTROLS
        if not name.startswith(("output_", "encoder_", "decoder_", "cross_attn"))
    }
    return found - {"token_type_ids"} if found <= _TEXT_INPUTS else found


PROMPT_INPUTS = {
    *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image_sizes"),
    *("second_per_grid_ts", "image_position_ids", "input_features", "feature_attention_mask"),
    *("mm_token_type_ids", "inputs_embeds"),
}
"""The usual ones, by their names, for messages about models that do not take them."""

NOT_READ = {
    *("input_ids", "use_cache", "return_dict", "logits_to_keep", "cache_position", *CACHES),
}
"""Arguments of a text decoder that are no part of a prompt, or of which windows have their own."""

_CROSS = "its layers look at pictures by cross attention in every step, with masks of each token"
_OWN_STEPS = "its steps after the prompt read more than the ids of new tokens"
_OWN_MASK = "it masks the prompt by a rule of its own"
TEXT_ONLY = {
    **dict.fromkeys(("mllama", "idefics"), _CROSS),
    "voxtral_realtime": "it adds sound to the embedding of every new token",
    "phi4_multimodal": "it switches its rotary embeddings and drops its cache in mid-text",
    **dict.fromkeys(
        ("granite_speech", "granite_speech_plus", "granite_speech5"),
        "its generate() switches LoRA by the modality of the prompt",
    ),
    **dict.fromkeys(("deepseek_ocr2", "molmo2", "step3p7", "git"), _OWN_MASK),
    "llama4": "transformers 5.24 raises AttributeError for every call of this class (5.23 runs it)",
    "diffusion_gemma": _OWN_STEPS,
}
"""Of model types whose prompts must be text: why, as their modelling files show (5.24)."""


PREFIX_LMS = {"paligemma"}
"""Model types whose whole prompt sees itself both ways. By which mask it does depends on types of
tokens, on padding and on the attention function, and without types HF masks text otherwise in a
batch than alone.
"""


def is_prefix_lm(model: PreTrainedModel) -> bool:
    """Whether what a token of a prompt sees depends on more than what stands before it."""
    return model.config.model_type in PREFIX_LMS


def auto_class(config: PreTrainedConfig) -> str:
    """Name of the auto class that loads a model: with its towers where the configuration names such
    a class, or there is no other, but for types whose prompts must be text.
    """
    whole = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    has_other = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    is_named = whole is not None and whole.__name__ in (config.architectures or ())
    is_whole = is_named and config.model_type not in TEXT_ONLY if has_other else whole is not None
    return "AutoModelForImageTextToText" if is_whole else "AutoModelForCausalLM"


def why_not_read(model: PreTrainedModel) -> str | None:
    """Why prompts of a model of this type must be text; `None` if nothing is known against it."""
    return TEXT_ONLY.get(model.config.model_type)


def special_tokens(model: PreTrainedModel) -> set[int]:
    """Ids that stand for something else than text: padding, ends, places of pictures."""
    configs = model.config, model.config.get_text_config()
    values = (
        v for c in configs for n, v in vars(c).items() if n.endswith(("token_id", "token_index"))
    )
    return {
        token
        for value in values
        for token in (value if isinstance(value, list | tuple) else [value])
        if isinstance(token, int)
    }


def placeholders(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids that stand in prompts where pictures and sound are, ascending."""
    names = tuple(f"{kind}_token_{of}" for kind in ("image", "video", "audio") for of in _ID)
    values = {vars(model.config).get(name) for name in names}
    return tuple(sorted(value for value in values if type(value) is int and value >= 0))


_ID = "id", "index"


def attention_homes(modules: Sequence[nn.Module]) -> list[ModuleType]:
    """The modelling files whose attention modules, of these, look a function up by name."""
    kinds = {kind for own in {*map(type, modules)} for kind in own.__mro__}
    homes = {sys.modules.get(kind.__module__) for kind in kinds}
    found = (home for home in homes if hasattr(home, "ALL_ATTENTION_FUNCTIONS"))
    return sorted(found, key=lambda home: home.__name__)


def attention_names(modules: Sequence[nn.Module]) -> list[str]:
    """Names of the attention functions that the configurations of models among these ask for."""
    configs = (module.config for module in modules if isinstance(module, PreTrainedModel))
    names = dict.fromkeys(config._attn_implementation for config in configs)
    return [name for name in names if name is not None]


def attention_functions(homes: Sequence[ModuleType], names: Sequence[str]) -> list[Callable]:
    """What attention modules of these files call where the configuration asks for these names."""
    functions = (
        home.ALL_ATTENTION_FUNCTIONS.get(name) or getattr(home, "eager_attention_forward", None)
        for home in homes
        for name in names
        if "/" not in name  # a kernel of the hub, which HF has loaded
    )
    return [function for function in functions if function is not None]


def mask_functions(homes: Sequence[ModuleType], names: Sequence[str]) -> list[Callable]:
    """What makes the masks of models of these files where the configuration asks for these names:
    functions that are registered, and those that the files call.
    """
    registered = (AttentionMaskInterface._global_mapping.get(name) for name in names)
    called = (
        value
        for home in homes
        for name, value in vars(home).items()
        if name.startswith("create_") and "mask" in name and callable(value)
    )
    return [function for function in (*registered, *called) if function is not None]


def code_of(modules: Sequence[nn.Module]) -> list[object]:
    """What the code of a model with these modules looks up by name while it runs: all that its
    classes hold, functions of the files that these are written in and of `torch.nn.functional`,
    and the attention and mask functions that its configurations ask for.
    """
    kinds = {kind for own in {*map(type, modules)} for kind in own.__mro__}
    kinds = sorted((k for k in kinds if k.__module__.split(".")[0] not in _TORCH), key=id)
    homes = {home for kind in kinds if (home := sys.modules.get(kind.__module__))}
    files = *sorted(homes, key=id), torch.nn.functional
    # What Dynamo compiles it leaves in these files, as `__compiled_fn_...`, and calls by itself.
    functions = [
        value
        for file in files
        for name, value in vars(file).items()
        if type(value) is FunctionType and not name.startswith("__")
    ]
    held = [value for kind in kinds for value in vars(kind).values()]
    looked_up = attention_homes(modules), attention_names(modules)
    return held + functions + attention_functions(*looked_up) + mask_functions(*looked_up)


_TORCH = "torch", "builtins"


def foreign_attention(model: PreTrainedModel) -> str | None:
    """The attention function that a model calls, if it is none of HF's and none of the model's own
    file: one that was registered, or put in the place of HF's.
    """
    return _first_foreign(attention_functions, model)


def foreign_masks(model: PreTrainedModel) -> str | None:
    """The same of what makes its masks."""
    return _first_foreign(mask_functions, model)


def _first_foreign(functions: Callable, model: PreTrainedModel) -> str | None:
    modules = modules_of(model)
    for home in attention_homes(modules):
        for function in functions([home], attention_names(modules)):
            origin = home_of(function)
            if origin != home.__name__ and not origin.startswith("transformers."):
                name = getattr(function, "__qualname__", type(function).__name__)
                return f"{origin}.{name}".removeprefix(".")
    return None


def home_of(function: object) -> str:
    """The module whose code a function is; `__module__` is what functools.wraps copies."""
    return getattr(function, "__globals__", {}).get("__name__", "")


TRUSTED = {
    *("transformers", "torch", "accelerate", "peft", "torchao", "bitsandbytes"),
    *("huggingface_hub", "safetensors", "numpy", "packaging", "tqdm"),
}
"""Packages whose code in a model treats all tokens of a call alike, or is refused by its name; and
those whose functions transformers' files import for other work.
"""


def has_own_code(model: PreTrainedModel) -> bool:
    """Whether anything runs in a model that is of no package that is known: hooks, functions in the
    place of forwards, classes, methods and functions of somebody else's.
    """
    modules = modules_of(model)
    running = [*_global_forward_hooks.values(), *_global_forward_pre_hooks.values()]
    running += [*code_of(modules), *(getattr(model, name, None) for name in GENERATING)]
    for module in modules:
        running += module._forward_hooks.values()
        running += module._forward_pre_hooks.values()
        running.append(vars(module).get("forward"))
    return foreign_attention(model) is not None or not all(map(_is_trusted, running))


def _is_trusted(code: object) -> bool:
    """Whether code, and what it is wrapped around (by `torch.no_grad`, by accelerate), are of known
    packages.
    """
    if isinstance(code, type) or not callable(code):
        return True
    if isinstance(code, partial):  # accelerate's way; of HF's own functions it changes arguments
        is_known = home_of(code.func).startswith(("accelerate.", "peft."))
    else:
        home = home_of(getattr(code, "__func__", code)) or type(code).__module__
        is_known = home.split(".")[0] in TRUSTED | sys.stdlib_module_names
    return is_known and _is_trusted(getattr(code, "__wrapped__", None))


GENERATING = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample"
"""Methods that HF's `generate` calls between forwards."""


def foreign_method(model: PreTrainedModel, name: str) -> bool:
    """Whether a method of a model is none of transformers'."""
    method = getattr(model, name, None)
    home = home_of(getattr(method, "__func__", method))
    return method is not None and not home.startswith(("transformers.", "torch."))


def device_of(module: nn.Module) -> torch.device | None:
    """Where a module computes: the device of its first weight, or, where that is offloaded, the one
    to which accelerate's hook brings it. `None` for a module without weights.
    """
    for part in module.modules():
        for weight in part._parameters.values():
            if weight is not None and not weight.is_meta:
                return weight.device
            hook = None if weight is None else getattr(part, "_hf_hook", None)
            for one in getattr(hook, "hooks", [hook]):  # a `SequentialHook` has several
                if getattr(one, "execution_device", None) is not None:
                    return torch.device(one.execution_device)
    return next((weight.device for weight in module.parameters()), None)


def position_limit(config: PreTrainedConfig) -> int | None:
    """Positions that the model can be given.

    Rotary scalings that look at the longest position of a forward ("longrope", "dynamic") change
    every position's angle once it passes the original range. Plain decoding switches in mid-text; a
    batch of drafts cannot, so such models are served within that range.

    A layer of Doge reads the `keep_window_size` keys whose values score highest. Equal tokens have
    equal values in its first layer, and which of them HF's `topk` takes depends on the number of
    keys: such models are served while all keys are read.
    """
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    kept = getattr(config, "keep_window_size", None)
    limit = min(limit, kept) if limit and kept else limit
    for parameters in _switching_ropes(config):
        original = parameters.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        limit = min(limit, original or limit)
    return limit


def cause_of_limit(config: PreTrainedConfig) -> str:
    """Why a model is given fewer positions than it is said to have, for messages."""
    kinds = [repr(parameters["rope_type"]) for parameters in _switching_ropes(config)]
    if not kinds and getattr(config, "keep_window_size", None) == position_limit(config):
        return ": beyond it layers choose keys, by values that may be equal (`keep_window_size`)"
    if not kinds:
        return ""
    return (
        f": from there on its rotary scaling ({', '.join(dict.fromkeys(kinds))}) turns all tokens "
        "by other angles, which happens in mid-text and cannot be taken back for a rejected draft"
    )


def _switching_ropes(config: PreTrainedConfig) -> list[dict]:
    rope = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    found = (rope, *per_layer_type)
    return [each for each in found if each.get("rope_type") in ("longrope", "dynamic")]


def newer_than_tried() -> str:
    """A remark for messages, where the installed version is newer than those that were tried."""
    newest = TRIED[1]
    if Version(transformers.__version__) <= Version(newest):
        return ""
    return (
        f" (transformers {transformers.__version__} is newer than {newest}, the newest tried with "
        "this version of specdec)"
    )


def without_renaming(forward: Callable) -> Callable:
    """A forward without the wrapper that takes arguments under their old names (5.24)."""
    while forward.__globals__["__name__"] == "transformers.utils.deprecation":
        forward = forward.__wrapped__
    return forward


IGNORED_ATTRIBUTES = {"training", "rope_deltas"}
"""Attributes of modules that decide nothing: views are in evaluation mode and are given positions.
"""

ATTENTION_FIELD, EXPERTS_FIELD = "_attn_implementation_internal", "_experts_implementation_internal"
"""Fields of a configuration with the implementation that its layers run."""


def set_implementation(config: object, field: str, implementation: str) -> None:
    """Changes one of these fields, without HF's checks; configurations without it stay as they
    are.
    """
    if field in vars(config):
        vars(config)[field] = implementation


def call_of_generate() -> dict[str, Any]:
    """What HF's `generate` was given, in the call that this one comes from; empty if there is none.
    It can only be seen in the frames: `generate` itself, and the wrapper around it, which still has
    the keywords that HF has taken out.
    """
    of_hf = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not of_hf:
        frame = frame.f_back
    if frame is None:
        return {}
    given = {} if frame.f_back is None else frame.f_back.f_locals.get("kwargs", {})
    return {**(given if isinstance(given, dict) else {}), **frame.f_locals}


INDEXED_LAYERS = {"indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse"}
"""What layers are called that read the keys which an indexer chooses; the second in 5.17."""
INDEX_COUNT, BLOCK_COUNT = "index_topk", "topk_blocks"
"""An indexer's attribute: so many keys it chooses, or blocks of them."""
INDEX_KEYS = "indexer_keys", "idx_keys"
"""What a layer of HF's cache calls the keys of its indexer."""


def reads_chosen_keys(module: nn.Module) -> bool:
    """Whether an attention module reads the keys which an indexer of its own chooses, or one of an
    earlier layer.
    """
    if hasattr(module, COMPRESS_RATE):  # whose indexer chooses entries
        return False
    indexer = getattr(module, "indexer", None)
    has_own = any(hasattr(indexer, name) for name in (INDEX_COUNT, BLOCK_COUNT))
    return has_own or (hasattr(module, "indexer") and getattr(module, "skip_topk", False))


COMPRESS_RATE = "compress_rate"
"""A compressor's attribute: of so many tokens it makes an entry."""


def has_compressor(module: nn.Module) -> bool:
    """Whether an attention module reads entries of several tokens, beside the nearest tokens."""
    return hasattr(getattr(module, "compressor", None), COMPRESS_RATE)


WINDOWED_LAYERS = {
    **{"sliding_attention": "sliding window", "chunked_attention": "chunks"},
    "compressed_sparse_attention": "sliding window beside its entries",
    "heavily_compressed_attention": "sliding window beside its entries",
}
"""Kinds of layers that must be seen to have a window, and what the window is called."""

UNDERSTOOD_LAYERS = {
    *("full_attention", "linear_attention", "conv", "hybrid", "mlp", "moe", "sparse", "dense"),
    *(*INDEXED_LAYERS, *WINDOWED_LAYERS),
}
"""Kinds of `config.layer_types` that run over slots."""

_ONE_LENGTH = "its decoder counts positions from one length of all rows, and takes no position_ids"
_FROM_IDS = (
    "it counts positions from the padding ids in one call, so that they depend on how a text is cut"
)
_OWN_CACHE = "its state lives outside of HF's cache, which specdec puts its slots in the place of"
_FROM_OFFSET = (
    "its biases and the temperature of its queries count positions from the offset of HF's cache, "
    "one for all rows"
)
_ON_HOST = (
    "its indexer goes through the queries one by one on the host, with positions that it keeps in "
    "a layer of HF's cache"
)
CAUSES = {
    "git": "its attention adds a mask of its own, which it makes from the tokens of one call",
    "roformer": "it rotates by positions from one length of all rows, and takes no position_ids",
    **dict.fromkeys(("bart", "mbart", "marian", "pegasus", "plbart", "mvp", "trocr"), _ONE_LENGTH),
    **dict.fromkeys(("bigbird_pegasus", "blenderbot", "blenderbot-small", "whisper"), _ONE_LENGTH),
    **dict.fromkeys(("roberta", "roberta-prelayernorm", "camembert", "xlm-roberta"), _FROM_IDS),
    **dict.fromkeys(("xlm-roberta-xl", "xmod", "data2vec-text"), _FROM_IDS),
    "cpmant": "it puts learned tokens before the text, and reads the whole text in every call",
    "doge": "layers choose keys by their values, and add that mask to one of a sliding window",
    **dict.fromkeys(
        ("minimax", "recurrent_gemma", "rwkv", "xlnet", "reformer", "xlstm"), _OWN_CACHE
    ),
    "musicgen": "its tokens are of four codebooks, not single ids",
    "musicgen_melody": "its tokens are of four codebooks, not single ids",
    "prophetnet": "it reads one token in a call with a cache",
    "xlm": "it reads the whole text in every call",
    **dict.fromkeys(("inkling_text", "inkling_mm_model", "inkling2_text"), _FROM_OFFSET),
    **dict.fromkeys(("inkling2", "inkling2_loop", "inkling2_loop_text"), _FROM_OFFSET),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _ON_HOST),
    "blt": "it cuts bytes into patches whose number depends on the text",
    "zaya": "its layers keep keys and values and a recurrent state beside them",
}
"""Of model types that are refused: why, as their modelling files show (transformers 5.24)."""


def cause_of_refusal(model: PreTrainedModel) -> str:
    """Why a model of this type cannot be decoded, for messages; empty if it is not known."""
    kinds = {model.config.model_type, model.config.get_text_config().model_type}
    return next((f": {CAUSES[kind]}" for kind in sorted(kinds & CAUSES.keys())), "")


ROTATE = "apply_rotary_pos_emb"
"""In every modelling file, the function that rotates queries and keys."""

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Linear layers that read one input."""

JOINED_GATE_UP, ACTIVATIONS = "gate_up_proj", ("act_fn", "activation_fn")
"""A layer that is both of the latter, and what a gated MLP calls its activation."""

EXPERTS = "is_transposed", "has_gate"
"""Attributes of the experts whose forward HF chooses by the configuration."""

FILTERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Settings of HF that `LogitsFilter` applies, with the value that does nothing."""

BESIDE_FILTERS = {
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "watermarking_config": None,
    "renormalize_logits": False,
}
"""Settings that HF applies between or after these four."""

BEFORE_FILTERS = {
    "guidance_scale": 1,
    "sequence_bias": None,
    "encoder_repetition_penalty": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
"""Settings that HF applies before them, also in greedy decoding."""

STATELESS = {
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.MinPLogitsWarper,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopHLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.WatermarkLogitsProcessor,  # seeds its generator anew from the ids of every call
}
"""Logits processors for text whose scores depend on their arguments alone. Their subclasses are not
among them.
"""

_SEARCH = (
    "specdec decodes greedily or samples, with num_return_sequences=n for several samples of a "
    "prompt; use HF generate for beam or contrastive search and for constraints"
)
_ONLY_HF = (
    "no result holds them (a drafter's feature_layers read hidden states in the loop); leave it "
    "out, or use HF generate"
)
_ASSISTED = (
    "it belongs to HF's assisted generation; leave it out: the generator's drafter drafts, with "
    "num_draft_tokens of its own"
)
HEALING = (
    "it changes the prompts, which a result holds as they were passed; heal them first, with "
    "input_ids = model.heal_tokens(input_ids, tokenizer), and leave token_healing out"
)
"""Why `token_healing` is no option, and what to do."""
UNSUPPORTED = {
    "num_beams": ((1,), _SEARCH),
    "penalty_alpha": ((0,), _SEARCH),
    "dola_layers": ((0,), _SEARCH),
    "constraints": ((), _SEARCH),
    "force_words_ids": ((), _SEARCH),
    "output_attentions": ((False,), _ONLY_HF),
    "output_hidden_states": ((False,), _ONLY_HF),
    "use_mtp": ((False,), _ASSISTED),
    "prompt_lookup_num_tokens": ((0,), _ASSISTED),
    "assistant_early_exit": ((0,), _ASSISTED),
    "num_assistant_tokens": ((20,), _ASSISTED),
    "num_assistant_tokens_schedule": (("constant", "heuristic"), _ASSISTED),
    "assistant_confidence_threshold": ((0.4,), _ASSISTED),
    "assistant_lookbehind": ((10,), _ASSISTED),
    "target_lookbehind": ((10,), _ASSISTED),
    "assistant_ensemble_weight": ((), _ASSISTED),
    "speculation_type": ((), _ASSISTED),
}
"""Settings of other searches, HF's defaults of them, and why nothing else may be asked for."""
