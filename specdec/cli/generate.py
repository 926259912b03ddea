"""`specdec generate`: completes a prompt with models of one's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from specdec.cli.options import Parts, Prompt, Sampling, Target
from specdec.show.table import need


def generate(
    *,
    target: Target,
    prompt: Prompt,
    max_new_tokens: Annotated[int, Option(help="at most")] = 128,
    trace: Annotated[
        Path | None,
        Option(metavar="FILE", help="all steps: .html (a page), .jsonl, .parquet; default: none"),
    ] = None,
    sampling: Sampling,
    parts: Parts,
) -> None:
    """Complete a prompt with models of your own.

    Sampling is neutral but for what is given, as in specdec evaluate: of the target's
    generation_config only the ids that end and pad a text are used.
    """
    options = sampling.given(parts)
    if trace is not None:
        check_trace_file(trace)
    generator, tokenizer = parts.load(target)
    from specdec.show.tokens import colour_key, coloured_text

    inputs = tokenizer(prompt, return_tensors="pt").to(parts.device)
    options |= {"do_sample": sampling.temperature != 0, "neutral": True}
    options |= {"max_new_tokens": max_new_tokens, "trace": trace is not None}
    result = generator.generate(inputs.input_ids, inputs.get("attention_mask"), **options)
    print(coloured_text(tokenizer, prompt, result.steps[0], sys.stdout))
    print("\n" + colour_key(sys.stdout))
    if result.seeds:
        print(f"seed {result.seeds[0]}")
    print(result.stats)
    if trace is not None:
        getattr(result.trace.with_tokenizer(tokenizer), f"to_{trace.suffix[1:]}")(trace)


def check_trace_file(path: Path) -> None:
    """Raises an error unless a trace can be written there in the form that the name ends with."""
    if path.suffix not in (".html", ".jsonl", ".parquet"):
        raise ValueError(f"--trace must end in .html, .jsonl or .parquet, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"--trace {path}: there is no folder {path.parent}")
    if path.suffix == ".parquet":
        need("pyarrow", "--trace of .parquet")
        need("pandas", "--trace of .parquet")
