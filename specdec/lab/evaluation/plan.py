"""What a run is made with: its plan, and everything else that a saved number comes from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

from specdec.arguments import check_integer, check_number
from specdec.generator import SpeculativeGenerator
from specdec.hf.lookups import attention_of
from specdec.lab.evaluation.pictures import is_processor, tokenizer_of
from specdec.lab.evaluation.prompts import Prompt, as_prompts, template_reads
from specdec.request.call import read_request
from specdec.request.keywords import OUTPUTS
from specdec.settings import fingerprint, plain, settings_of_function

_OWN = {
    "num_return_sequences": "samples=n takes n texts of each prompt",
    "streamer": "generator.stream shows text while it is written",
    "trace": "generator.generate(..., trace=True) returns one",
    **dict.fromkeys(OUTPUTS, "generator.generate returns them"),
}
"""Options of `generate` that would change or lose what is measured, and what to do instead."""


@dataclass(frozen=True)
class Plan:
    """How an evaluation generates: arguments of `evaluate`, all of which decide the result;
    `options` are its further ones.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    batch_size: int | None = 1
    samples: int = 1
    seed: int = 0
    max_prompt_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name in ("max_new_tokens", "batch_size", "samples", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None or name in ("max_new_tokens", "samples"):
                check_integer(name, value, 1)
        check_number("temperature", self.temperature, 0)
        check_integer("seed", self.seed, 0, 2**64 - 1)
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("samples > 1 are all the same at temperature 0; pass a temperature")
        for name in self.options.keys() & _OWN.keys():
            raise TypeError(f"evaluate has no option {name}: {_OWN[name]}")
        do_sample = self.options.get("do_sample")
        if do_sample not in (None, self.temperature > 0):
            raise ValueError(
                f"do_sample={do_sample} does not go with temperature {self.temperature:g}: a "
                "temperature above 0 samples, and 0, the default, is greedy; leave do_sample out"
            )
        said = {name: value for name, value in self.options.items() if name != "do_sample"}
        object.__setattr__(self, "options", said)

    def sampling(
        self, seeds: list[int], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> dict[str, Any]:
        """Options of `generate` for rows of these seeds; stop strings need the tokenizer."""
        options = {"neutral": True, "num_return_sequences": 1, "tokenizer": tokenizer}
        options |= self.options
        if self.temperature == 0:
            return {"do_sample": False, **options}
        return {"do_sample": True, "temperature": self.temperature, "seed": seeds, **options}


def settings_of_run(
    generator: SpeculativeGenerator,
    prompts: Iterable[str | Prompt | Sequence[int]],
    *,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    **plan: Any,
) -> dict[str, Any]:
    """What `evaluate` would save about a run as `about["run"]`, but for its shard: two runs with
    equal settings measure the same.

    Args:
        generator, prompts, tokenizer: as for `evaluate`.
        plan: arguments of `Plan`.

    Example:
        >>> from specdec import PromptLookupDrafter, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), PromptLookupDrafter(3))
        >>> settings_of_run(generator, [[7, 8, 9]], seed=5)["drafter"]["max_ngram"]
        3
    """
    plan = Plan(**plan)
    for name in plan.chat_template_kwargs:
        if not template_reads(tokenizer, name):
            raise ValueError(
                f"chat_template_kwargs holds {name!r}, which the tokenizer's chat template does "
                "not read; leave it out"
            )
    records = as_prompts(prompts)
    given = {n: _described(v) if n == "tokenizer" else v for n, v in plan.options.items()}
    values = plain({**vars(plan), "options": given})
    digest = hashlib.sha256()
    for prompt in records:
        digest.update(json.dumps([prompt.id, prompt.category, prompt.turns]).encode() + b"\n")
        for name, value in sorted((prompt.inputs or {}).items()):
            shown = value.tolist() if isinstance(value, torch.Tensor) else repr(value)
            digest.update(json.dumps([name, shown]).encode() + b"\n")
        for path in prompt.images:
            digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    options = {**plan.sampling([0], tokenizer_of(tokenizer)), "max_new_tokens": plan.max_new_tokens}
    prompt = torch.zeros(1, 1, dtype=torch.long, device=generator.target.device)
    ids = prompt, torch.ones_like(prompt)
    if generator.target.reads_source:
        from specdec.request.source import inert

        ids, options = (None, None), {**options, **inert(generator.target, prompt)}
    sampling = read_request(generator.target, *ids, options).sampling
    return {
        **_parts(generator),
        "plan": values,
        "sampling": dataclasses.asdict(sampling),
        "prompts": {"count": len(records), "sha256": digest.hexdigest()},
        "tokenizer": _described(tokenizer),
    }


def provenance() -> dict[str, Any]:
    """Versions of Python and of the libraries that results depend on, and the commit of specdec."""
    packages = {"specdec": "specdec-torch", "transformers": "transformers", "triton": "triton"}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name, package in packages.items():
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(package)
    return {"versions": versions, "git_revision": _git_revision()}


def _parts(generator: SpeculativeGenerator) -> dict[str, Any]:
    """Settings of a generator's parts, its precision and hardware."""
    target, drafter = generator.target, generator.drafter
    config = target.model.config
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "target": {
            "class": type(target.model).__name__,
            "name": _name_of(config),
            "parameters": sum(p.numel() for p in target.model.parameters()),
            "weights": fingerprint(target.model.parameters()),
            **({"edits": [*map(settings_of_function, target.edits)]} if target.edits else {}),
        },
        "drafter": {**drafter.settings(), "num_draft_tokens": drafter.num_draft_tokens},
        "sampler": generator.sampler.settings(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": attention_of(config),
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
    }


def _name_of(config: PreTrainedConfig) -> str:
    """The last part of where a model is from."""
    path = Path(getattr(config, "name_or_path", "") or "")
    return "zoo" if path.parent == Path(__file__).parents[1] / "zoo" / "weights" else path.name


def _described(
    reader: PreTrainedTokenizerBase | ProcessorMixin | None,
) -> dict[str, Any] | None:
    """What decides how texts, and pictures, become ids."""
    tokenizer = tokenizer_of(reader)
    if tokenizer is None:
        return None
    template = getattr(tokenizer, "chat_template", None)
    described = {
        "class": type(tokenizer).__name__,
        "name": Path(getattr(tokenizer, "name_or_path", "") or "").name,
        "tokens": len(tokenizer),
        "chat_template": template and _digest(repr(template)),
    }
    if is_processor(reader):
        described |= {"processor": type(reader).__name__}
        described |= {"processor_settings": _digest(reader.to_json_string())}
    return described


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _git_revision() -> str | None:
    """The commit that specdec runs from, with `+changes` where files differ from it; `None` where
    specdec does not run from a clone.
    """
    describe = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    options = {"cwd": Path(__file__).parent, "stderr": subprocess.DEVNULL, "text": True}
    found = ""
    try:  # the first fails where specdec is installed inside another clone
        for arguments in (["ls-files", "--error-unmatch", Path(__file__).name], describe):
            found = subprocess.check_output(["git", *arguments], timeout=10, **options)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.strip()
