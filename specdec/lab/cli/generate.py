"""`specdec generate`: completes a prompt with models of one's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from specdec.lab.cli.options import Images, Parts, Prompt, Sampling, Target, refuse
from specdec.lab.show.table import need
from specdec.lab.show.text import printable


def generate(
    *,
    target: Target,
    prompt: Prompt = None,
    image: Images = None,
    audio: Annotated[
        Path | None,
        Option(metavar="FILE", help="WAV to transcribe, in place of a prompt; default: none"),
    ] = None,
    max_new_tokens: Annotated[int, Option(help="at most; of a recording, a window's")] = 128,
    trace: Annotated[
        Path | None,
        Option(metavar="FILE", help="all steps: .html (a page), .jsonl, .parquet; default: none"),
    ] = None,
    sampling: Sampling,
    parts: Parts,
) -> None:
    """Complete a prompt with models of your own.

    Options that are left out truncate and penalise nothing, as in specdec evaluate: of the target's
    generation_config only the ids that end and pad a text are used. A prompt with pictures
    (--image) goes through the target's processor and its chat template. A recording (--audio) is
    transcribed greedily as the target's own generate does it, window by window.
    """
    options = sampling.given(parts)
    if (prompt is None) == (audio is None):
        raise ValueError("expected --prompt, or --audio without it, got both or neither; pass one")
    if audio is not None:
        more = {"image": image, "trace": trace, "temperature": sampling.temperature or None}
        refuse(more, "belongs to prompts; leave it out beside --audio")
        return _transcribed(target, audio, parts, max_new_tokens)
    if trace is not None:
        check_trace_file(trace)
    pictures = processor = None
    if image:  # what is wrong with pictures is said before weights are loaded
        from specdec.lab.evaluation.pictures import load_processor, open_pictures

        pictures, processor = open_pictures(image), load_processor(target)
    generator, tokenizer = parts.load(target)
    from specdec.lab.evaluation.intervals import counted
    from specdec.lab.show.tokens import colour_key, coloured_text

    if processor is None:
        inputs = tokenizer(prompt, return_tensors="pt").to(parts.device)
        inputs = {name: inputs.get(name) for name in ("input_ids", "attention_mask")}
    else:
        inputs = _pictured(processor, prompt, pictures, generator.target)
    options |= {"do_sample": sampling.temperature != 0, "neutral": True}
    options |= {"max_new_tokens": max_new_tokens, "trace": trace is not None}
    result = generator.generate(**inputs, **options)
    if pictures:
        for path, picture in zip(image, pictures, strict=True):
            print(f"picture {printable(str(path))}, {picture.width} x {picture.height}")
        print(f"a prompt of {counted(len(result.prompts[0]), 'token')}")
    shown = prompt if processor is None else f"{prompt}\n"  # where a template puts more
    print(coloured_text(tokenizer, shown, result.steps[0], sys.stdout))
    print("\n" + colour_key(sys.stdout))
    if result.seeds:
        print(f"seed {result.seeds[0]}")
    print(result.stats)
    if trace is not None:
        found = result.trace.with_tokenizer(tokenizer)
        found = found.with_pictures([pictures]) if pictures else found
        getattr(found, f"to_{trace.suffix[1:]}")(trace)


def _transcribed(target: str, audio: Path, parts: Parts, max_new_tokens: int) -> None:
    """Prints a transcript."""
    from specdec.lab.cli.audio import features_of, transcribe

    features = features_of(target, audio)  # what is wrong is said before weights are loaded
    own = {"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens}
    lines, stats = transcribe(*parts.load(target), features, **own)
    print(*map(printable, lines), sep="\n")
    print(f"\n{stats}")


def _pictured(processor: Any, prompt: str, pictures: list[Any], target: Any) -> dict[str, Any]:
    """What the target's `generate` takes of a prompt with pictures."""
    from specdec.lab.evaluation.pictures import inputs_of, message

    place = {"dtype": target.dtype, "device": target.device}
    return inputs_of(processor, [message("user", prompt, pictures)], **place)


def check_trace_file(path: Path) -> None:
    """Raises an error unless a trace can be written there in the form that the name ends with."""
    if path.suffix not in (".html", ".jsonl", ".parquet"):
        raise ValueError(f"--trace must end in .html, .jsonl or .parquet, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"--trace {path}: there is no folder {path.parent}")
    if path.suffix == ".parquet":
        need("pyarrow", "--trace of .parquet")
        need("pandas", "--trace of .parquet")
