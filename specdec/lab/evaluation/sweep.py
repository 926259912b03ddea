"""`sweep`: a study, drafters x lengths of drafts x samplers x temperatures and whatever else is
varied, with an evaluation for each cell.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from specdec import processes
from specdec.arguments import check_choice, check_integer, shown
from specdec.drafters import Drafter, NoDrafter
from specdec.drafters.visible import visible_of
from specdec.generator import SpeculativeGenerator
from specdec.hf.generation import FILTERS
from specdec.lab.evaluation.batches import batches_of, device_id
from specdec.lab.evaluation.cells import (
    CHOICES,
    DRAWING,
    OF_DRAFTER,
    Cell,
    StudyFolder,
    file_of,
    without_idle,
)
from specdec.lab.evaluation.hf_generate import HFGenerate
from specdec.lab.evaluation.markers import alone
from specdec.lab.evaluation.pictures import tokenizer_of
from specdec.lab.evaluation.plan import Plan
from specdec.lab.evaluation.prompts import (
    Prompt,
    as_prompts,
    own_prompts,
    processor_for,
    read_prompts,
)
from specdec.lab.evaluation.run import Run, measure, progress_bar
from specdec.lab.evaluation.study import Study
from specdec.loading import find_drafter, load_drafter, load_sampler, load_target
from specdec.paths import check_folder
from specdec.request import GenerateOptions
from specdec.samplers import BlockSampler, RejectionSampler, Sampler
from specdec.targets import Target

WAYS = SpeculativeGenerator, HFGenerate
"""Whole ways of decoding, which keep what they are."""
_OF_SAMPLING = {*FILTERS, "samples"} - {"temperature"}
"""Options that greedy cells leave out: they have no effect there."""
_OF_PLAN = set(inspect.signature(Plan).parameters) - {"temperature", "options"}


def sweep(
    target: PreTrainedModel | Target | str = "zoo",
    prompts: str | Path | Iterable[str | Prompt | Sequence[int]] | None = None,
    *,
    drafters: Iterable[str | Drafter | Callable[..., Drafter]] | Mapping[str, Any] = ("lookup",),
    drafts: Iterable[int | str | None] = (None,),
    samplers: Iterable[str | Sampler] | Mapping[str, Any] = ("auto",),
    temperatures: Iterable[float] = (0.0,),
    vary: Mapping[str, Iterable[Any]] | None = None,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    limit: int | None = None,
    timed: bool = False,
    rounds: int = 1,
    output: str | Path | None = None,
    share: bool = False,
    progress: bool = False,
    **options: Any,
) -> Study:
    """Evaluates every cell of a study on the same prompts.

    Cells that are one rule run once: all samplers and proposals at temperature 0; block and
    rejection, and all proposals, where the drafts are chains of point masses.

    Args:
        target: a model, `"zoo"`, or a folder or Hugging Face id, which comes with its tokenizer.
        prompts: as in `evaluate`, or the file that `read_prompts` reads; 16 of specdec's own by
            default.
        drafters: names as on the command line (`specdec.loading.load_drafter`), functions of
            (target, num_draft_tokens), drafters, or whole ways of decoding: generators and
            `HFGenerate`, which keep their sampler; by names of your own in a mapping. Local paths
            are called by the shortest ends that differ.
        drafts: K of chains, and trees as `"32x6"`, 32 nodes of depth 6; `None` (or `"own"`, in a
            file) is what each drafter drafts by default. Of a drafter that is an object, at most
            its K.
        samplers: names as on the command line, or samplers; by names of your own in a mapping.
        temperatures: 0 is greedy.
        vary: further options, each with the values that it takes: of `evaluate` or `generate`,
            `{"top_p": [0.9, 1.0], "batch_size": [1, 8]}`; of drafters `"proposal"` (`"sample"`,
            `"argmax"`), `"draft_temperature"` and `"visible"` (`"all"`, `"4+508"` for `Sinks(4) +
            Recent(508)`), for those that can be made with each.
        tokenizer: of a target that is a model; for prompts with pictures of files its processor.
        dtype, device: of a target that is a name. Each of several processes takes its own GPU.
        limit: so many first prompts.
        timed: cells with the same batches take turns on each batch, so that their times compare.
            A process that measures them is the only one on its device.
        rounds: of a timed study, how often each batch is generated; the median time counts.
        output: folder for a file per cell. Where it holds some, the study goes on after their last
            batch; a file that was measured with other settings is refused. All processes with this
            folder, however they were started, take what is free, and return the whole study.
        share: as in `evaluate`.
        progress: shows a bar on standard error.
        options: of `evaluate` and `generate`, the same in all cells: `max_new_tokens`, `seed`,
            `batch_size`, ...; those of sampling (`samples`, `top_k`, ...) are left out where the
            temperature is 0.

    Raises:
        TypeError: an argument that `evaluate` and `generate` do not have.
        ValueError: a name or value that cannot be right, before anything is generated from it.

    Example:
        >>> study = sweep(drafters=["lookup", "none"], drafts=[2], limit=6, max_new_tokens=8)
        >>> study.difference({"drafter": "none"}, {"drafter": "lookup"}).value >= 0
        True
    """
    check_integer("rounds", rounds, 1)
    check_choice("timed", timed, (True, False))
    if limit is not None:
        check_integer("limit", limit, 1, advice="None takes all prompts")
    vary = dict(vary or {})
    _check_names(options, vary)
    drafters, samplers = _named("drafter", drafters), _named("sampler", samplers)
    axes = {"drafter": drafters, "draft": drafts, "sampler": samplers}
    axes |= {"temperature": temperatures, **vary}
    values = [_values(name, given) for name, given in axes.items()]
    cells = without_idle([dict(zip(axes, each, strict=True)) for each in product(*values)])
    samplers = {n: load_sampler(s) if isinstance(s, str) else s for n, s in samplers.items()}
    _refuse_early(cells, drafters, samplers)
    if output is not None:
        check_folder("output", output)
    if prompts is None or isinstance(prompts, str | Path):
        prompts = own_prompts() if prompts is None else read_prompts(prompts)
    prompts = as_prompts(prompts)[:limit]
    if isinstance(target, str):
        place = processes.local_device(device) if share else device
        reader = processor_for(target, prompts)  # refused before weights are loaded
        target, tokenizer = load_target(target, dtype=dtype, device=place)
        tokenizer = reader or tokenizer
    target = target if isinstance(target, Target) else Target(target)
    team = processes.team(target.model, share=share)
    bench = _Bench(target, prompts, tokenizer, drafters, samplers, options, team)
    cells = [bench.resolved(cell) for cell in cells]
    files, rules = [], {}
    for cell, rule in zip(cells, map(bench.rule, cells), strict=True):
        files.append(file := file_of(rule))
        if rules.setdefault(file, rule) != rule:
            raise ValueError(
                f"{cell} and another cell would have one file, {file}; pass drafters and samplers "
                "in a mapping with names of yours"
            )
    folder = None if output is None else StudyFolder(output)
    if folder is not None:
        team.from_first(lambda: folder.add(cells, files, timed=timed))
    groups: dict[Any, list[str]] = {}  # cells that are measured together
    for file, rule in rules.items():
        groups.setdefault(bench.layout(rule) if timed else file, []).append(file)
    runs: dict[str, Run] = {}
    total = sum(len(bench.layout(rule)) for rule in rules.values())

    def measured(group: list[str], bar: tqdm, *, wait: bool) -> None:
        with ExitStack() as stack:
            if timed and folder is not None:
                on_device = alone(folder.path / device_id(target.device))
                team.from_first(lambda: stack.enter_context(on_device))
            own = [bench.run(rules[file]) for file in group]
            for file, run in zip(group, own, strict=True):
                stack.enter_context(run.recorded(folder and folder.path / file))
            runs.update(zip(group, own, strict=True))
            turns = {"warmup": int(timed), "rounds": rounds}
            measure(own, runs.values(), wait=wait, bar=bar, **turns)
        for run in own:
            run.release()

    with progress_bar(team, total, is_wanted=progress) as bar:
        for group in groups.values():
            measured(group, bar, wait=False)
        for group in groups.values() if folder is not None else ():
            if not all([runs[file].settle() for file in group]):  # others were at it
                measured(group, bar, wait=True)
    found = {file: run.evaluation() for file, run in runs.items()}
    return Study(cells, [found[file] for file in files], timed)


def compare(
    contenders: Mapping[str, SpeculativeGenerator | HFGenerate],
    prompts: Tensor | Iterable[str | Prompt | Sequence[int]],
    attention_mask: Tensor | None = None,
    *,
    temperature: float = 0.0,
    rounds: int = 5,
    **options: Any,
) -> Study:
    """Runs every contender on every batch, in turn and several times, so that a drift of the
    machine meets all of them. Greedy texts that differ from the first contender's are noted.

    Args:
        contenders: by name, the one that others are compared with first.
        prompts, attention_mask: as in `evaluate`.
        temperature: 0 is greedy.
        rounds: how often each batch is generated; the median time counts.
        options: of `sweep`: `max_new_tokens`, `batch_size`, `tokenizer`, `progress`, ...

    Returns:
        A timed study of one axis, `drafter`; its table has the speed over the first contender,
        `study.ratio(...)` that over any other.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> from specdec.lab.evaluation import HFGenerate
        >>> target = zoo.load_target()
        >>> ways = {"HF": HFGenerate(target), "lookup": SpeculativeGenerator(target, "lookup")}
        >>> study = compare(ways, [[7, 8, 9, 7, 8], [9, 9, 9]], max_new_tokens=4, rounds=1)
        >>> bool(study.ratio({"drafter": "HF"}, {"drafter": "lookup"}).value > 0)
        True
    """
    if len(contenders) < 2:
        raise ValueError(f"there is nothing to compare: {len(contenders)} contenders, pass two")
    for name, way in contenders.items():
        if not isinstance(way, SpeculativeGenerator | HFGenerate):
            raise TypeError(
                f"contender {name!r} must be a SpeculativeGenerator or HFGenerate(model), got "
                f"{shown(way)}"
            )
    target = next(iter(contenders.values())).target
    ways = {"drafters": contenders, "temperatures": [temperature]}
    records = as_prompts(prompts, attention_mask)
    return sweep(target, records, **ways, timed=True, rounds=rounds, **options)


def read_study(path: str | Path) -> dict[str, Any]:
    """The arguments of `sweep` that a TOML file names; options of `evaluate` and `generate` stand
    beside them.

    Raises:
        ValueError: the file is no TOML.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "study.toml")
        ...     _ = path.write_text('drafters = ["lookup"]\\ndrafts = [2, 4]')
        ...     read_study(path)
        {'drafters': ['lookup'], 'drafts': [2, 4]}
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML file: {error}") from error


class _Bench:
    """What all cells share, and the drafters that were made last: cells of one drafter follow each
    other.
    """

    def __init__(
        self,
        target: Target,
        prompts: list[Prompt],
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None,
        drafters: Mapping[str, Any],
        samplers: Mapping[str, Sampler],
        options: Mapping[str, Any],
        team: processes.Team,
    ):
        self._target, self._prompts, self._tokenizer = target, prompts, tokenizer
        self._drafters, self._samplers = drafters, samplers
        self._options, self._team = options, team
        self._drafter, self._draws = lru_cache(2)(self._made), lru_cache(2)(self._shown_to_draw)

    def resolved(self, cell: Cell) -> Cell:
        """The cell with the size of its drafts, where the drafter says it."""
        if cell["draft"] is not None:
            return cell
        return {**cell, "draft": size_of(self._drafter(cell["drafter"], None))}

    def rule(self, cell: Cell) -> Cell:
        """The cell without what has no effect in it: cells of one rule generate the same."""
        parts, rule = (cell["drafter"], cell["draft"]), dict(cell)
        is_way = isinstance(self._drafters[cell["drafter"]], WAYS)
        seen = _of_drafter(cell, ("visible",))
        seen = seen if self._takes(cell, seen) else {}
        drafter, sampler = self._drafter(*parts, **seen), self._samplers[cell["sampler"]]
        if not drafter.num_draft_tokens:
            rule["draft"] = 0
        is_greedy = cell["temperature"] == 0
        if is_greedy:
            rule |= dict.fromkeys(_OF_SAMPLING & rule.keys())
        drawing = _of_drafter(cell, DRAWING)
        drawing = drawing if not is_greedy and self._takes(cell, drawing) else {}
        if drawing.get("proposal") == "argmax":  # the same at every temperature
            drawing.pop("draft_temperature", None)
        rule = {n: v for n, v in rule.items() if n not in OF_DRAFTER} | drawing | seen
        if is_way:
            is_any = True
        elif is_greedy:  # what equals the target's own token is accepted, see `accept_greedily`
            methods = ("forward", "accept_greedily")
            is_any = all(getattr(type(sampler), m) is getattr(Sampler, m) for m in methods)
        else:
            is_any = type(sampler) in (BlockSampler, RejectionSampler)
            is_any &= drafter.tree_depth is None and not self._draws(*parts, **_of_drafter(rule))
        return rule | ({"sampler": None} if is_any else {})

    def run(self, rule: Cell) -> Run:
        """The evaluation of a rule, which is yet to be measured."""
        generator = self._drafters[rule["drafter"]]
        if not isinstance(generator, WAYS):
            generator = self._joined(rule)
        return Run(generator, self._prompts, self._plan(rule), self._tokenizer, self._team)

    def _joined(self, rule: Cell) -> SpeculativeGenerator:
        drafter = self._drafter(rule["drafter"], rule["draft"] or None, **_of_drafter(rule))
        sampler = "block" if rule["sampler"] is None else self._samplers[rule["sampler"]]
        return SpeculativeGenerator(self._target, drafter, sampler)

    def layout(self, rule: Cell) -> tuple[int, ...]:
        """The rows of every batch."""
        return tuple(map(len, batches_of(self._prompts, self._plan(rule))))

    def _plan(self, rule: Cell) -> Plan:
        own = {name: v for name, v in rule.items() if name not in (*CHOICES, "temperature")}
        given = {**self._options, **own}
        if rule["temperature"] == 0:
            given = {name: v for name, v in given.items() if name not in _OF_SAMPLING}
        of_plan = {name: given.pop(name) for name in _OF_PLAN & given.keys()}
        return Plan(temperature=rule["temperature"], **of_plan, options=given)

    def _made(self, name: str, draft: int | str | None, **drawing: Any) -> Drafter:
        given = self._drafters[name]
        if isinstance(given, WAYS):
            return _resized(name, given.drafter, draft, is_free=False)
        if isinstance(given, Drafter):
            return _resized(name, given, draft)
        if given is None or given == "none":
            return NoDrafter()
        options = {**_size(draft), **drawing, "tokenizer": tokenizer_of(self._tokenizer)}
        return load_drafter(given, self._target, **options)

    def _takes(self, cell: Cell, options: dict[str, Any]) -> bool:
        """Whether the cell's drafter can be made with some options."""
        given = self._drafters[cell["drafter"]]
        if isinstance(given, (Drafter, *WAYS)) or given in (None, "none"):
            return False
        try:
            find_drafter(given, **_size(cell["draft"]), **options)
        except ValueError:
            return False
        return True

    def _shown_to_draw(self, name: str, draft: int | str | None, **drawing: Any) -> bool:
        """Whether drafts come with the probabilities that they were drawn from: a step shows it."""
        drafter = self._drafter(name, draft, **drawing)
        generator = SpeculativeGenerator(self._target, drafter, graphs=False)
        ids = torch.zeros(1, 2, dtype=torch.long, device=self._target.device)
        options = {"max_new_tokens": 2, "do_sample": True, "seed": 0, "neutral": True}
        generation = generator.start(ids, torch.ones_like(ids), **options)
        return generator.step(generation).draft.probs is not None


def _size(draft: int | str | None) -> dict[str, Any]:
    """As `load_drafter` takes it."""
    return {"tree" if isinstance(draft, str) else "num_draft_tokens": draft}


def _of_drafter(cell: Cell, names: Sequence[str] = OF_DRAFTER) -> dict[str, Any]:
    """Those of a drafter's options that a cell gives it."""
    return {name: cell[name] for name in names if cell.get(name) not in (None, "all")}


def _resized(
    name: str, drafter: Drafter, draft: int | str | None, *, is_free: bool = True
) -> Drafter:
    """A drafter that is an object, at a size that it has; only its own, if it is not free."""
    own = size_of(drafter)
    if draft in (None, own):
        return drafter
    if is_free and isinstance(draft, int) and isinstance(own, int) and draft < own:
        return with_draft_length(drafter, draft)
    raise ValueError(
        f"drafter {name!r} is an object that drafts {own}, and the study asks it for {draft}; pass "
        "a name or a function of (target, num_draft_tokens), which can be made with each"
    )


def with_draft_length(drafter: Drafter, num_draft_tokens: int) -> Drafter:
    """The same drafter, over the same weights, with another K.

    Args:
        drafter: left as it is.
        num_draft_tokens: K, at most the drafter's own.

    Example:
        >>> from specdec import PromptLookupDrafter
        >>> with_draft_length(PromptLookupDrafter(8), 3).num_draft_tokens
        3
    """
    if drafter.tree_depth is not None:
        raise ValueError(f"expected a drafter of chains, and {type(drafter).__name__} drafts trees")
    advice = "the drafter's own is the largest; make it with a larger one"
    check_integer("num_draft_tokens", num_draft_tokens, 0, drafter.num_draft_tokens, advice=advice)
    other = copy.copy(drafter)
    other.num_draft_tokens = num_draft_tokens
    return other


def size_of(drafter: Drafter) -> int | str:
    """K of chains, or a tree's nodes and depth.

    Example:
        >>> from specdec import PromptLookupDrafter
        >>> size_of(PromptLookupDrafter(4)), size_of(PromptLookupDrafter(8, num_continuations=2))
        (4, '8x4')
    """
    nodes, depth = drafter.num_draft_tokens, drafter.tree_depth
    return nodes if depth is None else f"{nodes}x{depth}"


def _check_names(options: Mapping[str, Any], vary: Mapping[str, Any]) -> None:
    """Refuses options that neither `sweep` nor `evaluate` nor `generate` has."""
    known = {*inspect.signature(sweep).parameters, *_OF_PLAN, *get_type_hints(GenerateOptions)}
    known -= {"options"}
    for axis in ("drafter", "draft", "sampler", "temperature"):
        if axis in vary:
            raise TypeError(f"{axis} is varied by {axis}s=[...], not in vary")
    for name in OF_DRAFTER:
        for given in {name, f"{name}s"} & options.keys():
            raise TypeError(f"{given} goes into vary: vary={{{name!r}: [...]}}")
    for name in (options.keys() | vary.keys() - set(OF_DRAFTER)) - known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f": did you mean {close[0]!r}?" if close else ""
        if name in ("tree", "trees"):
            hint = ': a tree is a value of drafts, drafts=[4, "32x6"]'
        raise TypeError(f"a study has no argument {name!r}{hint}")


def _refuse_early(
    cells: list[Cell], drafters: Mapping[str, Any], samplers: Mapping[str, Sampler]
) -> None:
    """Finds all drafters, and refuses samplers that cannot verify the trees of the study."""
    for cell in cells:
        made, draft = drafters[cell["drafter"]], cell["draft"]
        check_choice("a value of proposal", cell.get("proposal"), ("sample", "argmax", None))
        visible_of(cell.get("visible"))
        if not isinstance(made, (Drafter, *WAYS)) and made not in (None, "none"):
            find_drafter(made, **_size(draft))
        if isinstance(draft, str) and not samplers[cell["sampler"]].takes_trees:
            raise ValueError(
                f"sampler {cell['sampler']!r} verifies chains, and the study has the tree {draft}; "
                "leave one of them out"
            )


def _named(what: str, given: Any) -> dict[str, Any]:
    """Parts by their names."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{what}s must be a list or a mapping of names, got {shown(given)}")
    given, named = list(given), {}
    short = _short_names([part for part in given if isinstance(part, str)])
    for part in given:
        name = (
            short[part] if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)
        )
        if name in named:
            raise ValueError(f"two {what}s are called {name!r}; pass a mapping with names of yours")
        named[name] = part
    return named


def _short_names(names: list[str]) -> dict[str, str]:
    """What a study calls the parts of these names: of local paths the shortest ends that differ,
    with the kind before and the attribute after them; all other names as they are.

    Example:
        >>> [*_short_names(["lookup", "eagle:/data/a/head", "~/x/mine.py:make"]).values()]
        ['lookup', 'eagle:head', 'mine.py:make']
    """
    ends = {}
    for name in names:
        kind, _, path = name.rpartition(":") if name.count(":") == 1 else ("", "", name)
        if "/" in kind:  # of a file and what is in it
            kind, path = "", name
        is_local = path.startswith(("/", "./", "../", "~")) or ("/" in path and Path(path).exists())
        parts = path.rstrip("/").split("/") if is_local else [path]
        most = range(1, len(parts) + 1)
        prefix = f"{kind}:" if kind else ""
        ends[name] = [prefix + "/".join(parts[-n:]) for n in most]
    found = {}
    for name, own in ends.items():
        others = {end for other, each in ends.items() if other != name for end in each}
        found[name] = next((end for end in own if end not in others), name)
    return found


def _values(axis: str, values: Iterable[Any]) -> list[Any]:
    """The values of an axis, each once."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"the values of {axis} must be a list, got {shown(values)}")
    found = [float(v) if axis == "temperature" else None if v == "own" else v for v in values]
    for value in found:
        if not (value is None or isinstance(value, bool | int | float | str)):
            raise TypeError(
                f"a value of {axis} must be a number, a text, True, False or None, got "
                f"{shown(value)}"
            )
    if not found:
        raise ValueError(f"the values of {axis} are an empty list")
    return list(dict.fromkeys(found))
