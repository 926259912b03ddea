"""Tries every type that HF registers as a causal LM: HF's own greedy text, or refused.

    python tests/census/run.py                    # all types, with windows of several sizes
    python tests/census/run.py --write            # and write the table of docs/models.md
    python tests/census/run.py gpt_neo --windows 30

Models are tiny and random (`shapes.py`), the witness is HF (`judge.py`). Each type runs in a process
of its own, which ends after a time limit. The exit code is 1 where a text is wrong, or where
something else than a refusal ends it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))
from census.judge import CRASHED, EQUAL, HF_CANNOT, HF_DIFFERS, REFUSED, WRONG, Verdict, judge
from census.shapes import VOCAB, build, has_window, model_types

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TABLE = re.compile(r"(?<=<!-- census -->\n).*?(?=<!-- /census -->)", re.DOTALL)
WINDOWS: dict[str, int | None] = {"70": 70, "default": None, "5": 5, "30": 30, "300": 300}
"""Sizes in tokens of windows and buffers; the default is that of the type's configuration."""


def prompts(window: int | None) -> list[torch.Tensor]:
    """A prompt that is longer than the window, and a short one."""
    generator = torch.Generator().manual_seed(1)
    lengths = (700 if window and window > 100 else 150, 20)
    return [torch.randint(3, VOCAB - 9, (length,), generator=generator) for length in lengths]


def of_type(model_type: str, window: int | None) -> Verdict:
    """The verdict on a tiny model of a type."""
    try:
        model = build(model_type, window=window)
    except Exception as error:  # whatever a foreign model raises
        return Verdict(HF_CANNOT, f"{type(error).__name__}: {error}")
    return judge(model, prompts(window))


def _send(model_type: str, window: str, end: Connection) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for the life of the process
    end.send(of_type(model_type, WINDOWS[window]))


def run(
    tasks: list[tuple[str, str]], *, processes: int, limit_s: float
) -> Iterator[tuple[str, str, Verdict, float]]:
    """Verdicts on types with windows, in the order in which they come, each with the seconds that it took."""
    context, waiting, running = multiprocessing.get_context("fork"), list(tasks)[::-1], {}
    while waiting or running:
        while waiting and len(running) < processes:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(*waiting[-1], theirs))
            process.start()
            theirs.close()
            running[ours] = (*waiting.pop(), process, time.monotonic())
        now = time.monotonic()
        left = min(start + limit_s - now for *_, start in running.values())
        ready = wait(list(running), timeout=max(0.0, left))
        for end, (model_type, window, process, start) in list(running.items()):
            seconds = time.monotonic() - start
            if end in ready:
                try:
                    verdict = end.recv()
                except EOFError:
                    process.join()
                    verdict = Verdict(CRASHED, f"the process ended with {process.exitcode}")
            elif seconds >= limit_s:
                verdict = Verdict(CRASHED, f"not done in {limit_s:.0f} s")
                process.kill()
            else:
                continue
            process.join()
            del running[end]
            yield model_type, window, verdict, seconds


def merged(verdicts: dict[str, Verdict]) -> Verdict:
    """The worst verdict on a type over all windows, with the windows where they differ. A size with
    which HF makes no model says nothing.
    """
    kinds = [WRONG, CRASHED, HF_DIFFERS, REFUSED, EQUAL, HF_CANNOT]
    worst = min(verdicts.values(), key=lambda verdict: kinds.index(verdict.kind))
    windows = [w for w in WINDOWS if w in verdicts and verdicts[w].kind == worst.kind]
    if worst.kind == EQUAL or len(windows) == len(verdicts):
        return worst
    return Verdict(worst.kind, f"with windows of {', '.join(windows)}: {worst.remark}")


def reason(remark: str) -> str:
    """A refusal without what differs from model to model."""
    text = re.sub(r"\b\w+(ForCausalLM|ForConditionalGeneration|LMHeadModel|Decoder)\b", "it", remark)
    text = re.sub(r"\s*[.;,:]? ?(use|Use) HF generate.*", "", text)
    text = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", text)
    return text.replace("it cannot be decoded over specdec's cache ", "")


def table(results: dict[str, Verdict]) -> str:
    """What `--write` writes."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, verdict in sorted(results.items()):
        said = "" if verdict.kind in (EQUAL, WRONG, CRASHED) else reason(verdict.remark)
        if verdict.kind in (WRONG, CRASHED):
            said = verdict.remark
        groups[verdict.kind, said].append(name)
    lines = [f"| result | types of transformers {transformers.__version__} |", "|---|---|"]
    for kind in (EQUAL, REFUSED, HF_CANNOT, HF_DIFFERS, CRASHED, WRONG):
        for (of, said), names in sorted(groups.items(), key=lambda item: -len(item[1])):
            if of == kind:
                said = f": {said}" if said else ""
                lines.append(f"| {kind}{said} ({len(names)}) | {', '.join(names)} |")
    return "\n".join(lines)


def main() -> int:
    """As on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="default: all")
    parser.add_argument("--windows", nargs="+", choices=WINDOWS, default=list(WINDOWS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120, help="seconds for a type")
    parser.add_argument("--write", action="store_true", help="the table of docs/models.md")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    first, *others = arguments.windows
    types = arguments.types or model_types()
    tasks = [(name, first) for name in types]
    tasks += [(name, window) for window in others for name in types if has_window(name)]
    found: dict[str, dict[str, Verdict]] = defaultdict(dict)
    options = {"processes": arguments.processes, "limit_s": arguments.limit}
    for name, window, verdict, seconds in run(tasks, **options):
        found[name][window] = verdict
        print(f"{name} {window}: {verdict.kind} {verdict.remark} ({seconds:.1f} s)", flush=True)
    results = {name: merged(verdicts) for name, verdicts in found.items()}
    print(table(results))
    if arguments.write:
        PAGE.write_text(TABLE.sub(lambda _: f"\n{table(results)}\n\n", PAGE.read_text()))
    return int(any(verdict.kind in (WRONG, CRASHED) for verdict in results.values()))


if __name__ == "__main__":
    sys.exit(main())
