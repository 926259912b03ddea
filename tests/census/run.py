"""Tries every type that HF registers as a causal LM: HF's own greedy text, or refused.

    python tests/census/run.py                      # with windows of several sizes
    python tests/census/run.py --write              # and write the table of docs/types.md
    python tests/census/run.py gpt_neo --windows 30
    python tests/census/run.py --group multimodal   # text prompts on models of pictures
    python tests/census/run.py --device cuda        # captured steps

Models are tiny and random (`shapes.py`), the witness is HF (`judge.py`). Each type runs in a
process of its own, which ends after a time limit. The exit code is 1 where a text is wrong, or
where something else than a refusal ends it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))
from census.judge import (
    CRASHED,
    EQUAL,
    HF_CANNOT,
    HF_DIFFERS,
    NOT_CAPTURED,
    REFUSED,
    WRONG,
    Verdict,
    judge,
    judge_captured,
)
from census.shapes import VOCAB, build, has_window, model_classes, remembers

PAGE = Path(__file__).parents[2] / "docs" / "types.md"
NOT_BUILT = "not built by the census"
WINDOWS: dict[str, int | None] = {"70": 70, "default": None, "5": 5, "30": 30, "300": 300}
"""Sizes in tokens of windows and buffers; the default is that of the type's configuration."""

SEEDS = 0, 1, 4, 5
"""Of the weights of types that remember. HF's Zamba 2 differs from itself with the last two."""


def prompts(window: int | None, device: str) -> list[torch.Tensor]:
    """A prompt that is longer than the window, and a short one. Of default windows GPT-Neo's, a
    buffer of 256 tokens, is the one that is exceeded.
    """
    generator = torch.Generator().manual_seed(1)
    lengths = ({None: 300, 300: 700}.get(window, 150), 20)
    texts = [torch.randint(3, VOCAB - 9, (length,), generator=generator) for length in lengths]
    return [text.to(device) for text in texts]


@dataclass(frozen=True)
class Case:
    """A type of a group of `model_classes`, with the name of a window and the seed of weights."""

    group: str
    model_type: str
    window: str = "70"
    device: str = "cpu"
    seed: int = 0


def seeds_of(model_type: str, group: str) -> tuple[int, ...]:
    """Of the models of a type: several where it remembers, since HF may differ from itself."""
    return SEEDS if remembers(model_type, group) else SEEDS[:1]


def verdict_on(case: Case) -> Verdict:
    """What specdec makes of a tiny model."""
    window = WINDOWS[case.window]
    try:
        made = build(case.model_type, group=case.group, window=window, seed=case.seed)
        model = made.to(case.device)
    except Exception as error:  # whatever a foreign model raises
        return Verdict(NOT_BUILT, f"{type(error).__name__}: {error}")
    judge_by = judge if case.device == "cpu" else judge_captured
    return judge_by(model, prompts(window, case.device))


def _send(case: Case, end: Connection) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for the life of the process
    end.send(verdict_on(case))


def run(
    cases: Iterable[Case], *, processes: int, limit_s: float
) -> Iterator[tuple[Case, Verdict, float]]:
    """Verdicts in the order in which they come, each with the seconds that it took."""
    context, waiting = multiprocessing.get_context("fork"), deque(cases)
    running: dict[Connection, tuple[Case, BaseProcess, float]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            case = waiting.popleft()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(case, theirs))
            process.start()
            theirs.close()
            running[ours] = case, process, time.monotonic()
        oldest = min(start for *_, start in running.values())
        ready = wait(list(running), timeout=max(0.0, oldest + limit_s - time.monotonic()))
        for end, (case, process, start) in list(running.items()):
            seconds = time.monotonic() - start
            if end in ready:
                verdict = _received(end, process)
            elif seconds >= limit_s:
                process.kill()
                verdict = Verdict(CRASHED, f"not done in {limit_s:.0f} s")
            else:
                continue
            process.join()
            del running[end]
            yield case, verdict, seconds


def _received(end: Connection, process: BaseProcess) -> Verdict:
    try:
        return end.recv()
    except EOFError:
        process.join()
        return Verdict(CRASHED, f"the process ended with {process.exitcode}")


def merged(verdicts: dict[str, Verdict], what: str = "windows") -> Verdict:
    """The worst verdict on a type over all windows, or seeds, with those of them where they differ.
    A size with which HF makes no model says nothing.
    """
    kinds = [WRONG, CRASHED, HF_DIFFERS, REFUSED, NOT_CAPTURED, EQUAL, HF_CANNOT, NOT_BUILT]
    worst = min(verdicts.values(), key=lambda verdict: kinds.index(verdict.kind))
    where = [name for name, verdict in verdicts.items() if verdict.kind == worst.kind]
    if worst.kind == EQUAL or len(where) == len(verdicts):
        return worst
    return Verdict(worst.kind, f"with {what} of {', '.join(where)}: {worst.remark}")


def reason(verdict: Verdict) -> str:
    """A remark in short: without what differs from model to model, what was tried, and advice."""
    text = " ".join(verdict.remark.replace("|", "\\|").split())
    text = re.sub(r"; HF's forward of .*", "; HF differs from itself", text)
    text = re.sub(r"the function cannot be captured: (.*); keep the decision .*", r"\1", text)
    text = re.sub(r"[.;,:]? [Uu]se HF generate.*?(?=; HF differs|$)", "", text)
    text = re.sub(r"\b\w+(ForCausalLM|Generation|LMHead\w*|Decoder)\b", "the model", text)
    text = re.sub(r"(?<!\w)\d+(\.\d+)?(e-?\d+)?\b", "N", text)
    text = re.sub(r"(cache: [^(]+?) \(.*\)", r"\1", text)  # the reason that is named is enough
    return re.sub(r"\((.+); then \1\)", r"(\1)", text)


def table(results: dict[str, Verdict]) -> str:
    """Types by what was found."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, verdict in sorted(results.items()):
        said = verdict.remark if verdict.kind in (WRONG, CRASHED) else reason(verdict)
        groups[verdict.kind, "" if verdict.kind == EQUAL else said].append(name)
    lines = ["| result | types |", "|---|---|"]
    for kind in (EQUAL, NOT_CAPTURED, REFUSED, HF_DIFFERS, HF_CANNOT, NOT_BUILT, CRASHED, WRONG):
        found = {said: names for (of, said), names in groups.items() if of == kind}
        for said, names in sorted(found.items(), key=lambda item: -len(item[1])):
            lines.append(
                f"| {kind}{': ' if said else ''}{said} | {len(names)}: {', '.join(names)} |"
            )
    return "\n".join(lines)


def write(marked: str, results: dict[str, Verdict], windows: list[str]) -> None:
    """Into the page, between marks of that name."""
    counts = Counter(verdict.kind for verdict in results.values())
    said = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    head = (
        f"transformers {transformers.__version__}, {len(results)} types, windows: "
        f"{', '.join(windows)}; {said}"
    )
    marks = re.compile(f"(?<=<!-- census {marked} -->\n).*?(?=<!-- /census -->)", re.DOTALL)
    folded = f'<details markdown="1"><summary>{head}</summary>\n\n{table(results)}\n\n</details>'
    PAGE.write_text(marks.sub(lambda _: f"\n{folded}\n\n", PAGE.read_text(), count=1))


def read_log(path: Path | None) -> dict[Case, Verdict]:
    """What an earlier run with `--log` has found."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return {Case(**case): Verdict(**verdict) for case, verdict in map(json.loads, lines)}


def main() -> int:
    """As on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="default: all of the group")
    parser.add_argument("--group", choices=model_classes(), default="causal")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--windows", nargs="+", choices=WINDOWS, default=list(WINDOWS))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=600, help="seconds for a type and a window")
    parser.add_argument("--log", type=Path, help="JSON lines; cases that it has are not run again")
    parser.add_argument("--write", action="store_true", help="the table of docs/types.md")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # the witness is of float32
    group, types = arguments.group, arguments.types or sorted(model_classes()[arguments.group])
    cases = [
        Case(group, name, window, arguments.device, seed)
        for window in arguments.windows
        for name in types
        if window == arguments.windows[0] or has_window(name, group)
        for seed in seeds_of(name, group)
    ]
    known = read_log(arguments.log)
    left = [case for case in cases if case not in known]
    options = {"processes": arguments.processes, "limit_s": arguments.limit}
    for case, verdict, seconds in run(left, **options):
        known[case] = verdict
        name = f"{case.model_type} {case.window} {case.seed}"
        said = f"{name}: {verdict.kind} {verdict.remark}"
        print(f"{said} ({seconds:.1f} s)", flush=True)
        if arguments.log:
            with arguments.log.open("a") as log:
                log.write(json.dumps([asdict(case), asdict(verdict)]) + "\n")
    found: dict[str, dict[str, dict]] = defaultdict(lambda: defaultdict(dict))
    for case in cases:
        found[case.model_type][case.window][str(case.seed)] = known[case]
    results = {
        name: merged({w: merged(of_seeds, "seeds") for w, of_seeds in windows.items()})
        for name, windows in found.items()
    }
    print(table(results))
    if arguments.write:
        on = "" if arguments.device == "cpu" else ", captured"
        write(f"{group}{on}", results, arguments.windows)
    return int(any(verdict.kind in (WRONG, CRASHED) for verdict in results.values()))


if __name__ == "__main__":
    sys.exit(main())
