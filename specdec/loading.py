"""Names become parts: a target, a drafter and a sampler by what is written in a command, a file of
a study, or the arguments of a generator.

Names are resolved, and wrong names raise an error, before anything large is loaded.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from specdec.arguments import check_choice, shown
from specdec.atomic import check_whole
from specdec.drafters import (
    CommonVocabulary,
    Drafter,
    ModelDrafter,
    PromptLookupDrafter,
    SelfDrafter,
    SuffixDrafter,
    Tree,
)
from specdec.drafters.model import check_same_tokenizer
from specdec.drafters.tree_drafter import shape_of
from specdec.drafters.visible import draft_cache, visible_of
from specdec.hf.forward import device_of
from specdec.hf.prompts import auto_class
from specdec.lab.show.text import one_line, printable
from specdec.paths import check_path
from specdec.samplers import (
    BlockSampler,
    CouplingSampler,
    EnsembleSampler,
    GBVSampler,
    RejectionSampler,
    Sampler,
    SpecTrSampler,
    TypicalSampler,
)
from specdec.targets import Target

SAMPLERS: dict[str, type[Sampler]] = {
    "auto": BlockSampler,
    "block": BlockSampler,
    "rejection": RejectionSampler,
    "coupling": CouplingSampler,
    "gbv": GBVSampler,
    "spectr": SpecTrSampler,
    "typical": TypicalSampler,
    "ensemble": EnsembleSampler,
}
"""Samplers by name; the last needs a weight."""
MakeDrafter = Callable[..., Drafter | None]
"""(target, *, tokenizer, dtype, device) -> the drafter of a name that was found."""

NAMES = (
    "none, lookup, suffix, lookahead:15,5,15, self:1024, zoo:model, zoo:eagle3, zoo:mask-token, "
    "zoo:mtp, eagle:PATH, mask-token:PATH, mtp:PATH, medusa:PATH, assistant:PATH, PATH_OR_ID, "
    "mine.py:make, package.module:function or mine.py:NAME:PATH"
)
_ADVICE = (
    ("eagle eagle1 eagle2 eagle3", "eagle:PATH, or zoo:eagle3"),
    ("mask-token dflash dspark p-eagle pard", "mask-token:PATH, or zoo:mask-token"),
    ("mtp", "mtp:PATH, or zoo:mtp"),
    ("assistant gemma4-assistant", "assistant:PATH, the folder or Hugging Face id of one"),
    ("ngram n-gram pld prompt-lookup", "lookup"),
    ("zoo draft model", "zoo:model, or the folder or Hugging Face id of a model"),
    ("hydra", "mine.py:make, a drafter of your own; no such heads are read"),
)
"""What to write instead of names of the field that are none here, or only the half of one."""


def load_target(
    name: str, *, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, Any]:
    """Loads a causal LM, in eval mode, and its tokenizer.

    Args:
        name: `"zoo"`, a folder, or a Hugging Face id.
        dtype: of the parameters; `"auto"` takes that of the files, float32 for the zoo.
        device: where it is moved to.

    Raises:
        ValueError: there is no such model, its files lack weights, or the device cannot be used.

    Example:
        >>> model, tokenizer = load_target("zoo")
        >>> model.config.num_hidden_layers
        16
    """
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # torch raises RuntimeError, AssertionError and others
        reason = one_line(error)[:120]
        raise ValueError(f"device {device} cannot be used here: {reason}; try cpu") from error
    if name == "zoo":
        from specdec.lab import zoo

        dtype = getattr(torch, "float32" if dtype == "auto" else str(dtype).removeprefix("torch."))
        with _whole_in_each_process():
            return zoo.load_target(dtype=dtype).to(device), zoo.load_tokenizer()
    is_local = find_pretrained(name)
    tokenizer = load_pretrained("AutoTokenizer", name, local_files_only=is_local)
    return load_causal_lm(name, dtype=dtype, device=device, is_local=is_local), tokenizer


def place_of(name: str, dtype: str | torch.dtype = "auto") -> tuple[str, str | torch.dtype]:
    """The folder or id of a model, and its data type: the zoo is computed in float32."""
    if name != "zoo":
        return name, dtype
    from specdec.lab import zoo

    return str(zoo.WEIGHTS_DIR / "target"), torch.float32 if dtype == "auto" else dtype


def load_drafter(
    name: str | Callable[..., Drafter],
    target: PreTrainedModel | Target,
    num_draft_tokens: int | None = None,
    *,
    tree: Tree | str | None = None,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    layouts: Sequence[Any] = (),
    **options: Any,
) -> Drafter | None:
    """Makes the drafter of a name.

    Args:
        name: `"none"` (plain decoding), `"lookup"`, `"suffix"`, `"zoo:eagle3"`;
            `"lookahead:5,4,5"`, a `LookaheadDrafter` of these W, N and G; `"self:1024"`, the target
            itself over a draft cache of so many tokens; the folder or Hugging Face id of a draft
            model, or of a head as `"eagle:PATH"`, `"mask-token:PATH"`, `"mtp:PATH"`,
            `"medusa:PATH"` or `"assistant:PATH"` (folders of all but `mtp` are recognised); or your
            own as `"mine.py:make"` or `"package.module:function"`, a function or class of (target,
            num_draft_tokens), and of `tree` and `options` where these are given; or such a function
            itself. `"mine.py:NAME:PATH"` is the folder or id of a head whose files are read by your
            own `specdec.checkpoints.Layout`, whatever they look like, or by your own `Family`.
        target: the model that it drafts for.
        num_draft_tokens: K; `None` for the drafter's own default.
        tree: drafted instead of chains of K tokens; `"32x6"` is `Tree(32, 6)`.
        tokenizer: the target's; a draft model with another one drafts what both have in common.
        dtype: of a draft model; `"auto"` takes that of its files.
        device: of a draft model; the target's by default.
        layouts: records of your own that a head's files are compared with first.
        options: `proposal` and `draft_temperature`, of drafters with probabilities, and `visible`,
            of those with keys and values, "4+508" for `Sinks(4) + Recent(508)`; `None` counts as
            not given.

    Returns:
        The drafter; `None` for `"none"`.

    Raises:
        ValueError: there is no such drafter, it cannot be loaded, or does not take an argument.

    Example:
        >>> from specdec.lab import zoo
        >>> load_drafter("zoo:eagle3", zoo.load_target(), 5).num_draft_tokens
        5
    """
    make = find_drafter(name, num_draft_tokens, tree=tree, layouts=layouts, **options)
    return make(target, tokenizer=tokenizer, dtype=dtype, device=device)


def find_drafter(
    name: str | Callable[..., Drafter],
    num_draft_tokens: int | None = None,
    *,
    tree: Tree | str | None = None,
    layouts: Sequence[Any] = (),
    **options: Any,
) -> MakeDrafter:
    """Finds what `load_drafter` will load, without loading any weights.

    Args:
        name, num_draft_tokens, tree, layouts, options: as there.

    Raises:
        ValueError: as there, as far as it can be known without the target.
    """
    given = {"num_draft_tokens": num_draft_tokens, "tree": shape_of(tree), **options}
    given["visible"] = visible_of(given.get("visible"))
    given = {key: value for key, value in given.items() if value is not None}
    if not isinstance(name, str):
        _refuse_layouts(layouts, repr(name))
        return _own_drafter(getattr(name, "__qualname__", repr(name)), name, **given)
    if (own := find_reading(name)) is not None:
        _refuse_layouts(layouts, name)
        families, records, path = own
        find_pretrained(path)
        return partial(_load_head, path, families, records, given)
    kind, _, path = name.partition(":")
    if num_draft_tokens is not None and tree is not None:
        raise ValueError("num_draft_tokens belongs to chains; leave it out beside tree")
    if name in ("none", "lookup", "suffix") or kind in ("self", "zoo", "lookahead"):
        _refuse_layouts(layouts, name)
    if name == "none":
        _refuse(given, "belongs to a drafter; there is none")
        return lambda target, **_: None
    if name in ("lookup", "suffix"):
        drafter = _of_text(name, **given)
        return lambda target, **_: drafter
    if kind == "lookahead":
        drafter = _lookahead(path, given)
        return lambda target, **_: drafter
    if kind == "self":
        if not path.isdecimal() or tree is not None or "visible" in given:
            raise ValueError(
                "self drafts chains over a draft cache, self:1024 for instance; leave out tree and "
                "visible"
            )
        given["visible"] = draft_cache(int(path))
        return lambda target, **_: SelfDrafter(target, **given)
    if kind == "zoo" and path:
        from specdec.lab import zoo

        check_choice("the zoo's drafter", path, zoo.DRAFTERS)
        return lambda target, **_: zoo.load_drafter(path, target, **given)
    # Here, since a generator of parts reads no files.
    from specdec.checkpoints.drafter import load
    from specdec.checkpoints.families import FAMILIES, RECOGNISED
    from specdec.checkpoints.survey import family_of

    if kind in FAMILIES and path:
        find_pretrained(path)
        given |= {"families": (FAMILIES[kind],), "layouts": layouts}
        return lambda target, **_: load(path, target, **given)
    advice = [text for names, text in _ADVICE if kind in names.split()]
    advice += [f"{kind}:PATH, the folder or Hugging Face id of a head"] if kind in FAMILIES else []
    if advice and not Path(name).exists():
        raise ValueError(f"there is no drafter {name!r}; write {advice[0]}")
    if (make := find_own(name)) is not None:
        _refuse_layouts(layouts, name)
        return _own_drafter(name, make, **given)
    kinds = {one.partition(":")[0] for one in NAMES.split(", ")} - {"PATH_OR_ID"}
    near = difflib.get_close_matches(kind, kinds, n=1, cutoff=0.75)
    if near and "/" not in kind and not Path(name).exists():  # asks no hub
        raise ValueError(f"there is no drafter {name!r}; did you mean {near[0]!r}?")
    try:
        is_local = find_pretrained(name)
    except ValueError as error:
        raise ValueError(f"{error}; a drafter is {NAMES}") from error
    if family_of(name, families=RECOGNISED, layouts=layouts):
        return lambda target, **_: load(name, target, layouts=layouts, **given)
    _refuse_layouts(layouts, name)
    return partial(_load_draft_model, name, is_local, given)


def find_reading(name: str) -> tuple[Sequence[Any], Sequence[Any], str] | None:
    """By which families and records of your own a head's files are read, and its folder or id, of
    `"mine.py:NAME:PATH"` or `"package.module:NAME:PATH"`; `None` for names of other forms. A record
    takes the files whatever they look like.

    Raises:
        ValueError: there is no such object, or it is neither a `Layout` nor a `Family`.
    """
    parts = re.fullmatch(r"(.+?\.py|[\w.]+):([^\W\d]\w*):(.+)", name)
    if parts is None:
        return None
    from specdec.checkpoints.families import FAMILIES
    from specdec.checkpoints.family import Family
    from specdec.checkpoints.layout import Layout

    if parts[1] in (*FAMILIES, "zoo", "self"):
        return None
    own = find_own(where := f"{parts[1]}:{parts[2]}")
    if isinstance(own, Family):
        return (own,), (), parts[3]
    if not isinstance(own, Layout):
        raise ValueError(
            f"{where} must be a specdec.checkpoints.Layout or Family, by which the files in "
            f"{parts[3]} are read, got {shown(own)}"
        )
    record = replace(own, mark=lambda clues: f"read as {where}")
    return tuple(FAMILIES.values()), (record,), parts[3]


def load_sampler(name: str, *, target_weight: float | None = None) -> Sampler:
    """Makes the sampler of a name.

    Args:
        name: `"auto"` (block), `"block"`, `"rejection"`, `"coupling"`, `"typical"`, `"ensemble"`,
            or your own, `"mine.py:Rule"` or `"package.module:Rule"`: an instance, or a class that
            needs no arguments.
        target_weight: of `"ensemble"`, 0.9 by default.

    Raises:
        ValueError: there is no such sampler, or it has no such weight.

    Example:
        >>> load_sampler("rejection")
        RejectionSampler()
    """
    options = {} if target_weight is None else {"target_weight": target_weight}
    if name != "ensemble":
        _refuse(options, "belongs to the sampler ensemble")
    elif not options:
        options["target_weight"] = 0.9
    own = find_own(name)
    if own is None:
        advice = "or your own as mine.py:Rule or package.module:Rule"
        return SAMPLERS[check_choice("sampler", name, SAMPLERS, advice=advice)](**options)
    with _code_of(name):
        sampler = own() if isinstance(own, type) else own
    if not isinstance(sampler, Sampler):
        raise ValueError(f"{name} must be a specdec Sampler or its class, got {shown(sampler)}")
    return sampler


def _load_head(
    path: str,
    families: Sequence[Any],
    layouts: Sequence[Any],
    options: dict[str, Any],
    target: Any,
    **_: Any,
) -> Drafter:
    """A head of whichever of the families the files or the records say."""
    from specdec.checkpoints.drafter import load

    return load(path, target, families=families, layouts=layouts, **options)


def _refuse_layouts(layouts: Sequence[Any], name: str) -> None:
    _refuse({"layouts": layouts} if layouts else {}, f"belongs to a head's files, not to {name}")


def find_pretrained(name: str) -> bool:
    """Looks for a model's files; whether only local ones may be read: of a folder, or of the cache
    while the hub is out of reach.

    Raises:
        ValueError: there is no such folder, or nothing that can be loaded in it.
    """
    from specdec.checkpoints.hub import check_reachable, is_repository_id

    path = check_path("a model", name or ".", what="a folder, or a Hugging Face id").expanduser()
    if name and (path / "config.json").is_file():
        return True
    if name:
        check_whole(path)
    if name and (path / "adapter_config.json").is_file():
        raise ValueError(
            f"cannot load {name!r}: it holds a PEFT adapter; merge it into its model and save "
            "that, or put it on the model in Python"
        )
    if not name or path.exists() or ("/" in name and not is_repository_id(name)):
        found = "there is none in it" if name and path.exists() else "there is no such folder"
        raise ValueError(
            f"cannot load {name!r}: it must be a folder with a config.json or a Hugging Face id, "
            f"and {found}"
        )
    try:
        return not check_reachable(name)
    except ValueError as error:
        raise ValueError(f"cannot load {name!r}: {error}") from error


def load_causal_lm(
    name: str, *, dtype: Any, device: Any, is_local: bool, **options: Any
) -> PreTrainedModel:
    """A causal LM in eval mode, with the towers that its configuration names; HF would draw weights
    that its files lack at random.
    """
    kind = auto_class(load_pretrained("AutoConfig", name, local_files_only=is_local))
    options |= {"dtype": dtype, "local_files_only": is_local, "output_loading_info": True}
    model, info = load_pretrained(kind, name, **options)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{name} is no whole causal LM: its files lack {len(missing)} tensors, "
            f"{', '.join(map(printable, missing[:3]))} among them; as a drafter a head is "
            f"eagle:{name} (or mask-token:, mtp:)"
        )
    return (model if device is None else model.to(device)).eval()


def load_pretrained(kind: str, name: str, **options: Any) -> Any:
    """What one of HF's auto classes loads.

    Raises:
        ValueError: with HF's error, of whatever kind.
    """
    try:
        with _whole_in_each_process():
            return getattr(transformers, kind).from_pretrained(name, **options)
    except Exception as error:  # damaged or hostile files end in errors of any kind
        raise ValueError(
            f"cannot load {name!r}: it must be a folder or a Hugging Face id of a causal LM with "
            f"its tokenizer ({type(error).__name__}: {error})"
        ) from error


@contextmanager
def _whole_in_each_process() -> Iterator[None]:
    """`accelerate launch --use_fsdp` has all processes but the first load zeros, which FSDP fills
    in models that it trains; a target is none.
    """
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    found = os.environ.get(name)
    if found is not None:
        os.environ[name] = "false"
    try:
        yield
    finally:
        if found is not None:
            os.environ[name] = found


def _of_text(
    name: str, num_draft_tokens: int = 8, tree: Tree | None = None, **options: Any
) -> Drafter:
    """A drafter that reads nothing but the text."""
    _refuse(options, f"belongs to drafters with weights, not to {name}")
    kinds = {"lookup": PromptLookupDrafter, "suffix": SuffixDrafter}
    if tree is None:
        return kinds[name](num_draft_tokens)
    if name == "suffix":
        raise ValueError(f"suffix drafts chains, got {tree}; lookup and heads draft trees")
    nodes, depth = tree.nodes, tree.depth
    if nodes % depth:
        raise ValueError(
            f"a tree of {nodes}x{depth} for lookup is made of continuations of {depth} tokens "
            f"each; pass a multiple of {depth} nodes, {nodes - nodes % depth}x{depth} for instance"
        )
    return PromptLookupDrafter(nodes, num_continuations=nodes // depth)


def _lookahead(sizes: str, given: dict[str, Any]) -> Drafter:
    """A `LookaheadDrafter` of W,N,G, or of its own sizes."""
    from specdec.drafters.lookahead import LookaheadDrafter

    _refuse(given, "does not go with lookahead, whose tree follows from W, N and G")
    numbers = sizes.split(",") if sizes else []
    if len(numbers) not in (0, 3) or not all(number.isdecimal() for number in numbers):
        raise ValueError(
            f"lookahead is lookahead:W,N,G, lookahead:5,4,5 for instance, got {sizes!r}"
        )
    return LookaheadDrafter(*map(int, numbers))


def _load_draft_model(
    name: str, is_local: bool, options: dict[str, Any], target: Any, *, tokenizer, dtype, device
) -> Drafter:
    vocabulary = None if tokenizer is None else _common_vocabulary(name, tokenizer, is_local)
    if device is None:  # a model that is offloaded says meta, and computes elsewhere
        device = device_of(target) if isinstance(target, torch.nn.Module) else target.device
    model = load_causal_lm(name, dtype=dtype, device=device, is_local=is_local)
    return ModelDrafter(model, vocabulary=vocabulary, **options)


def _common_vocabulary(name: str, tokenizer: Any, is_local: bool) -> CommonVocabulary | None:
    """Of a draft model's tokenizer, if it has one, and the target's; `None` where both are one."""
    try:
        own = load_pretrained("AutoTokenizer", name, local_files_only=is_local)
    except ValueError:  # a draft model need not come with one; then only sizes can be compared
        return None
    try:
        check_same_tokenizer(tokenizer, own)
    except ValueError:
        return CommonVocabulary.of(tokenizer, own)
    return None


def _own_drafter(
    name: str, make: Any, num_draft_tokens: int | None = None, **options: Any
) -> MakeDrafter:
    """The maker of a user's drafter; what is given must fit the signature."""
    count = options["tree"].nodes if "tree" in options else num_draft_tokens
    sizes = () if count is None else (count,)
    try:
        signature(make).bind(None, *sizes, **options)
    except TypeError as error:
        given = ", ".join(["target", "num_draft_tokens", *(f"{key}=" for key in options)])
        raise ValueError(f"{name} must be a function or class of ({given}): {error}") from error

    def made(target: Any, **_: Any) -> Drafter:
        try:
            with _code_of(name):
                drafter = make(target, *sizes, **options)
        except ValueError as error:
            raise ValueError(f"{error} (called with target and num_draft_tokens)") from error
        if not isinstance(drafter, Drafter):
            raise ValueError(f"{name} must return a specdec Drafter, got {shown(drafter)}")
        return drafter

    return made


def find_own(name: str) -> Any:
    """What `file.py:name` or `package.module:name` names; `None` for names of other forms."""
    where, _, attribute = name.rpartition(":")
    path = Path(where).expanduser().resolve() if where.endswith(".py") else None
    is_module = all(part.isidentifier() for part in where.split("."))
    if not attribute.isidentifier() or not (path or is_module):
        return None
    if path and not path.is_file():
        raise ValueError(f"there is no file {where} to take {attribute} from")
    with _code_of(name):
        module = _run_file(path, path.stat().st_mtime_ns) if path else import_module(where)
    if not hasattr(module, attribute):
        own = (part for part in vars(module).values() if hasattr(part, "__qualname__"))
        there = ", ".join(part.__qualname__ for part in own if part.__module__ == module.__name__)
        raise ValueError(f"{where} has no {attribute}; it has {there or 'no functions or classes'}")
    return getattr(module, attribute)


@cache
def _run_file(path: Path, changed_ns: int) -> ModuleType:
    """The module of a file, by the name of its path; one that was edited is run again."""
    spec = spec_from_file_location(str(path), path)
    module = sys.modules[str(path)] = module_from_spec(spec)  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@contextmanager
def _code_of(name: str) -> Iterator[None]:
    """A user's code imports what lies beside it, and an error of it becomes one sentence with the
    line that it comes from.
    """
    where = name.rpartition(":")[0]
    folder = Path(where).expanduser().resolve().parent if where.endswith(".py") else Path.cwd()
    sys.path.insert(0, str(folder))
    try:
        yield
    except (Exception, SystemExit) as error:
        ours = (__file__, importlib.__file__)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours]
        lines = [f"{f.filename}, line {f.lineno}: " for f in frames if f.filename[0] != "<"]
        place = "".join(lines[:1])
        said = shown(error.code) if isinstance(error, SystemExit) else error
        raise ValueError(f"{name}: {place}{type(error).__name__}: {said}") from error
    finally:
        sys.path.remove(str(folder))


def _refuse(given: dict[str, Any], why: str) -> None:
    for name in given:
        raise ValueError(f"{name} {why}")
