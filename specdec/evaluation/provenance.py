"""Where a saved number comes from: versions, hardware, code, data."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from specdec.generator import SpeculativeGenerator
from specdec.settings import fingerprint


def versions() -> dict[str, str | None]:
    """Of Python and of the libraries that results depend on."""
    return {
        "python": platform.python_version(),
        "specdec": _version("specdec-torch"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": _version("triton"),
    }


def git_revision() -> str | None:
    """The commit that specdec runs from, with `+changes` where files differ from it; `None` where
    specdec does not run from a clone.
    """
    here = Path(__file__)

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(here.parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", here.name) is None:  # installed inside another clone
        return None
    revision = git("rev-parse", "HEAD")
    return f"{revision}+changes" if revision and git("status", "--porcelain", "-uno") else revision


def describe(generator: SpeculativeGenerator) -> dict[str, Any]:
    """Settings of a generator's parts, its precision and hardware."""
    target, drafter = generator.target, generator.drafter
    config = target.model.config
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "target": {
            "class": type(target.model).__name__,
            "name": Path(getattr(config, "name_or_path", "") or "").name,
            "parameters": sum(p.numel() for p in target.model.parameters()),
            "weights": fingerprint(target.model.parameters()),
        },
        "drafter": {**drafter.settings(), "num_draft_tokens": drafter.num_draft_tokens},
        "sampler": generator.sampler.settings(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": getattr(config, "_attn_implementation", None),
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
    }


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any] | None:
    """What decides how texts become ids."""
    if tokenizer is None:
        return None
    template = getattr(tokenizer, "chat_template", None)
    return {
        "class": type(tokenizer).__name__,
        "tokens": len(tokenizer),
        "chat_template": template and hashlib.sha256(repr(template).encode()).hexdigest()[:16],
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
