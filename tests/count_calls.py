"""Counts what a call of the library runs through: files entered, calls, changes of file.

A tiny random Llama with an EAGLE-3 head, K = 3, one row, eager on a CPU. Only functions of files
under `specdec/` count; a change of file is a call from a function of one of them, with any number
of others between, into another.

    python tests/count_calls.py [--sampler rejection] [--greedy]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import specdec

PACKAGE = f"{Path(specdec.__file__).parent}/"


@dataclass
class Calls:
    """What was counted.

    Args:
        functions: calls by file and function.
        num_changes: of file.
    """

    functions: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_changes: int = 0

    @property
    def files(self) -> Counter[str]:
        """Calls by file."""
        files: Counter[str] = Counter()
        for (file, _), count in self.functions.items():
            files[file] += count
        return files

    def __str__(self) -> str:
        total = self.functions.total()
        lines = [f"{len(self.files)} files, {total} calls, {self.num_changes} changes of file"]
        for file, count in self.files.most_common():
            own = Counter({name: n for (f, name), n in self.functions.items() if f == file})
            names = ", ".join(f"{name} {n}" for name, n in own.most_common())
            lines.append(f"{count:5d} {file}: {names}")
        return "\n".join(lines)


def count_calls(function: Callable[[], Any]) -> Calls:
    """Runs a function and counts. A generator counts whenever it goes on, as Python sees it."""
    calls, inside = Calls(), []

    def profile(frame, event, argument) -> None:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE):
            return
        file = name.removeprefix(PACKAGE)
        if event == "call":
            calls.functions[file, getattr(frame.f_code, "co_qualname", frame.f_code.co_name)] += 1
            calls.num_changes += bool(inside) and inside[-1] != file
            inside.append(file)
        elif event == "return" and inside:
            inside.pop()

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def eagle_generator(sampler: str = "auto") -> tuple[Any, Any]:
    """A generator with an EAGLE-3 head, and ids of a prompt.

    Args:
        sampler: by name.
    """
    from architectures import VOCAB, build
    from eagle_heads import random_head

    from specdec import EagleDrafter, SpeculativeGenerator
    from specdec.drafters import EagleConfig
    from specdec.drafters.head.layer_config import LayerConfig

    model = build("llama")
    layer = LayerConfig(32, 48, num_heads=4, num_kv_heads=2, head_dim=8)
    head = random_head(EagleConfig("attention", layer, VOCAB, VOCAB, (0, 1, 3), 32)).float()
    generator = SpeculativeGenerator(model, EagleDrafter(head, model, 3), sampler)
    return generator, model.dummy_inputs["input_ids"][:1] % VOCAB


def count_eagle(sampler: str = "auto", **options: Any) -> tuple[Calls, Calls]:
    """A whole `generate` and one step of it, with an EAGLE-3 head; both after a first call.

    Args:
        sampler: by name.
        options: of the call.
    """
    generator, ids = eagle_generator(sampler)
    options = {"max_new_tokens": 12} | options
    generator.generate(ids, **options)
    generation = generator.start(ids, **options)
    generator.step(generation)
    step = count_calls(lambda: generator.step(generation))
    generation.close()
    return count_calls(lambda: generator.generate(ids, **options)), step


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sampler", default="auto")
    parser.add_argument("--greedy", action="store_true")
    arguments = parser.parse_args()
    options = {} if arguments.greedy else {"do_sample": True, "seed": 0}
    for name, calls in zip(
        ("generate", "step"), count_eagle(arguments.sampler, **options), strict=True
    ):
        print(f"{name}: {calls}\n")
