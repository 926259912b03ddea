"""With what a target drafts for itself: which layers it leaves out, how much of the text it sees.

The target writes texts once; what each way of drafting would accept at every token of them is
replayed, and what its steps take is timed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from specdec.arguments import check_integer, check_path, shown
from specdec.drafters import SelfDrafter, Visible
from specdec.drafters.visible import draft_cache
from specdec.evaluation.costs import CostCurve, costs, measure_costs
from specdec.evaluation.positions import every_position
from specdec.evaluation.replay import replay
from specdec.generator import SpeculativeGenerator
from specdec.jsonl import append_lines, read_lines
from specdec.request.lists import id_lists, left_padded
from specdec.samplers import BlockSampler
from specdec.settings import differences, fingerprint, plain, settings_of_function
from specdec.targets import Target
from specdec.trace import Trace

PATIENCE = 3
"""A search ends after so many sets of layers that are no faster than the best one."""
_BEGINNING = b'{"settings": '
ROWS = 8
"""Prompts that are read together, at most."""


class LayerChoice(NamedTuple):
    """Layers that run, K, and the predicted speed over plain decoding."""

    layers: tuple[int, ...]
    num_draft_tokens: int
    speedup: float


class CacheChoice(NamedTuple):
    """Slots that a draft sees, sinks included, K, and the predicted speed over plain decoding."""

    draft_cache: int
    num_draft_tokens: int
    speedup: float


def choose_layers(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    num_draft_tokens: int = 4,
    visible: Visible | None = None,
    rounds: int = 5,
    output: str | Path | None = None,
    progress: bool = False,
    **options: Any,
) -> LayerChoice:
    """Finds a set of layers to leave out, by measured acceptance per cost: first each layer is left
    out alone, then they are left out together, one more each time, beginning with the one that is
    missed the least.

    Args:
        target: that is to draft for itself.
        prompts: token ids.
        num_draft_tokens: the largest K.
        visible: see `SelfDrafter`.
        rounds: in which steps of all and of half of the layers are timed; others are on the line
            through them.
        output: file of JSON lines for what was measured, with which an interrupted search goes on.
        progress: shows a bar on standard error.
        options: of `generate`, for the texts: `max_new_tokens`, `temperature`, ...

    Returns:
        The fastest; `SelfDrafter(target, choice.num_draft_tokens, layers=choice.layers)` drafts so.

    Raises:
        TypeError: no target, or prompts that are no token ids.
        ValueError: no prompt; `output` holds a search with other settings.

    Example:
        >>> from specdec import zoo
        >>> target, few = Target(zoo.load_target()), {"max_new_tokens": 6, "rounds": 1}
        >>> choice = choose_layers(target, [[7, 8, 9]], num_draft_tokens=1, **few)
        >>> 0 < len(choice.layers) < 16
        True

    Reference: SWIFT, arXiv:2410.06916, which searches by the tokens that agree.
    """
    texts = _Texts(target, prompts, num_draft_tokens, options)
    total = check_integer("the number of the target's layers", target.num_layers, 2)

    def generator(layers: Iterable[int]) -> SpeculativeGenerator:
        own = {"visible": visible, "layers": tuple(layers)}
        return SpeculativeGenerator(target, SelfDrafter(target, num_draft_tokens, **own))

    def times(num_layers: int) -> list[list[float]]:
        """Of plain steps, and by K."""
        curve = texts.costs(generator(range(num_layers)), rounds)
        return [curve.plain_ms, *curve.step_ms.values()]

    file = None if output is None else check_path("output", output, what="a file of JSON lines")
    settings = texts.settings() | {"visible": plain(visible)}
    lines = _read(file, settings)
    if not lines:
        lines = [{"settings": settings, "ms": [times(total), times(total // 2)]}]
        _append(file, lines[0])
    full, half = np.array(lines[0]["ms"])  # [K + 2, rounds]
    found = {tuple(line[0]): LayerChoice(tuple(line[0]), *line[1:]) for line in lines[1:]}

    def without(left_out: Sequence[int]) -> LayerChoice:
        layers = tuple(i for i in range(total) if i not in left_out)
        if layers not in found:
            share = (total - len(layers)) / (total - total // 2)
            ms = np.maximum(full + share * (half - full), 1e-6).tolist()
            curve = CostCurve(full[0].tolist(), dict(enumerate(ms[1:])))
            found[layers] = LayerChoice(layers, *texts.best(texts.read(generator(layers)), curve))
            _append(file, found[layers])
        bar.update()
        return found[layers]

    with tqdm(total=2 * total - 2, disable=not progress, unit="set", smoothing=0) as bar:
        alone = [without([i]) for i in range(total)]
        order = sorted(range(total), key=lambda i: -alone[i].speedup)
        best, waited = alone[order[0]], 0
        for count in range(2, total):
            choice = without(order[:count])
            waited = 0 if choice.speedup > best.speedup else waited + 1
            best = max(best, choice, key=lambda one: one.speedup)
            if waited == PATIENCE:
                break
    return best


def plan_draft_caches(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    draft_caches: Iterable[int] = (256, 1024, 4096),
    batch_sizes: Iterable[int] = (1, 8),
    contexts: Iterable[int] = (4096, 32768),
    num_draft_tokens: int = 4,
    rounds: int = 5,
    **options: Any,
) -> dict[tuple[int, int], CacheChoice]:
    """The fastest draft cache and K by batch size and context.

    Args:
        target: that is to draft for itself.
        prompts: token ids, about as long as the contexts: acceptance is that of these texts at
            every context, and only times are those of the context.
        draft_caches: to choose among, see `draft_cache`.
        batch_sizes, contexts: rows, and tokens of each.
        num_draft_tokens: the largest K.
        rounds: in which steps are timed.
        options: of `generate`, for the texts: `max_new_tokens`, `temperature`, ...

    Example:
        >>> from specdec import zoo
        >>> target, few = Target(zoo.load_target()), {"max_new_tokens": 6, "rounds": 1}
        >>> sizes = {"draft_caches": [8], "batch_sizes": [2], "contexts": [64]}
        >>> found = plan_draft_caches(target, [[7, 8, 9]], num_draft_tokens=1, **sizes, **few)
        >>> found[2, 64].draft_cache
        8
    """
    texts, found = _Texts(target, prompts, num_draft_tokens, options), {}
    lengths = range(num_draft_tokens + 1)
    sizes = {"batch_sizes": list(batch_sizes), "contexts": list(contexts)}
    for count in draft_caches:
        drafter = SelfDrafter(target, num_draft_tokens, visible=draft_cache(count))
        generator = SpeculativeGenerator(target, drafter)
        read = texts.read(generator)
        curves = costs(generator, **sizes, draft_lengths=lengths, rounds=rounds)
        for size, curve in curves.items():
            found.setdefault(size, []).append(CacheChoice(count, *texts.best(read, curve)))
    return {size: max(those, key=lambda one: one.speedup) for size, those in found.items()}


class _Texts:
    """Texts of the target after some prompts, to be replayed with up to K draft tokens."""

    def __init__(
        self, target: Target, prompts: Sequence[Sequence[int]], most: int, options: dict[str, Any]
    ):
        if not isinstance(target, Target):
            raise TypeError(
                f"target must be a specdec Target, got {shown(target)}; pass Target(model)"
            )
        self._target, self._most = target, check_integer("num_draft_tokens", most, 1)
        prompts = id_lists("prompts", prompts)
        starts = range(0, len(prompts), ROWS)
        self._batches = [left_padded(prompts[i : i + ROWS], target.device) for i in starts]
        self._options = {"max_new_tokens": 64, "temperature": 0.0, "neutral": True} | options

    def settings(self) -> dict[str, Any]:
        """What the results come from."""
        ids = (ids for batch in self._batches for ids in batch)
        weights = fingerprint([*self._target.model.parameters(), *ids])
        edits = [*map(settings_of_function, self._target.edits)]
        own = {"edits": edits} if edits else {}
        return {"weights": weights, "most": self._most, "options": plain(self._options), **own}

    @cached_property
    def _traces(self) -> list[Trace]:
        plainly, options = SpeculativeGenerator(self._target, None), dict(self._options)
        traces = []
        for index, batch in enumerate(self._batches):
            if options["temperature"]:
                options["seed"] = [ROWS * index + row for row in range(len(batch[0]))]
            traces.append(plainly.generate(*batch, trace=True, **options).trace)
        return traces

    def read(self, generator: SpeculativeGenerator) -> list[Trace]:
        """The texts with what a drafter makes of every token."""
        return [every_position(generator, trace) for trace in self._traces]

    def costs(self, generator: SpeculativeGenerator, rounds: int) -> CostCurve:
        """Of steps with 0..K tokens after the first of these prompts."""
        lengths = range(self._most + 1)
        return measure_costs(generator, *self._batches[0], draft_lengths=lengths, rounds=rounds)

    def best(self, read: list[Trace], curve: CostCurve) -> tuple[int, float]:
        """The fastest K, and its speed over plain decoding."""
        lengths, rule = range(1, self._most + 1), BlockSampler()
        replays = (replay(read, num_draft_tokens=k, sampler=rule) for k in lengths)
        speedups = [float(one.speedup(curve).value) for one in replays]
        return 1 + int(np.argmax(speedups)), max(speedups)


def _read(file: Path | None, settings: dict[str, Any]) -> list[Any]:
    """Lines of an earlier search, whose settings must be these."""
    if file is None or not file.exists():
        return []
    content = file.read_bytes()
    if b"\n" not in content and _BEGINNING.startswith(content[: len(_BEGINNING)]):
        os.truncate(file, 0)  # interrupted while its first line was written
        return []
    lines = [line for _, line in read_lines(file, only_whole=True)]
    if not lines or not isinstance(lines[0], dict) or "settings" not in lines[0]:
        raise ValueError(f"{file} is no search of layers and would be lost; name another file")
    if off := differences(lines[0]["settings"], settings):
        raise ValueError(f"{file} holds another search, by {'; '.join(off)}; name another file")
    os.truncate(file, content.rfind(b"\n") + 1)  # a line that was cut short
    return lines


def _append(file: Path | None, line: Any) -> None:
    if file is not None:
        append_lines(file, line)
