"""Where a checkpoint is: in a local folder, or in a repository on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download

_REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


def find_folder(
    path_or_id: str | Path, *, allow_pickle: bool = False, revision: str | None = None
) -> Path:
    """Finds a checkpoint's folder; an id is fetched from the hub, or taken from its local cache.

    Only JSON and safetensors files of the top folder are fetched, and pickled ones with
    `allow_pickle`. No code of the repository is ever loaded.

    Args:
        path_or_id: a folder, or an id like `"yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"`.
        allow_pickle: fetch `.bin` files too.
        revision: branch, tag or commit on the hub.

    Raises:
        ValueError: neither a folder nor a repository that is available.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{path} is a file; pass the checkpoint's folder")
    if not _REPOSITORY.fullmatch(str(path_or_id)):
        raise ValueError(f"{path} is no folder, and no Hugging Face id like 'name/repository'")
    patterns = ["*.json", "*.safetensors", *(["*.bin"] if allow_pickle else [])]
    try:
        folder = snapshot_download(
            str(path_or_id), revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]
        )
    except Exception as error:  # offline, not found, no access: the hub raises many kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{path_or_id} is no folder here, and the Hugging Face hub does not provide it "
            f"({reason[:200]})"
        ) from error
    return Path(folder)
