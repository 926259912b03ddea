"""Where a checkpoint is: in a local folder, or in a repository on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from specdec.lab.show.text import one_line
from specdec.paths import check_path

_REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


def is_repository_id(name: str) -> bool:
    """Whether a name can be that of a repository on the hub.

    Example:
        >>> is_repository_id("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"), is_repository_id("./head")
        (True, False)
    """
    return _REPOSITORY.fullmatch(name) is not None and not name.startswith(".")


def check_reachable(repository: str, *, revision: str | None = None) -> bool:
    """Whether the hub can be asked for a repository; if not, it is in the local cache, and
    `ValueError` if it is in neither. Asks once and briefly: the hub's own client tries for a
    minute, file by file.
    """
    try:
        HfApi().model_info(repository, revision=revision, timeout=5.0)
    except Exception as error:  # offline, a proxy, a timeout: clients raise many kinds
        if isinstance(try_to_load_from_cache(repository, "config.json", revision=revision), str):
            return False
        is_refused = isinstance(error, RepositoryNotFoundError | RevisionNotFoundError)
        raise _unavailable(repository, error, is_refused=is_refused) from error
    return True


def _unavailable(repository: str, error: Exception, *, is_refused: bool) -> ValueError:
    where = " and is not in the local cache, and the Hugging Face hub cannot be reached"
    if is_refused:
        where = ", and the Hugging Face hub does not provide it"
    return ValueError(f"{repository} is no folder here{where} ({one_line(error)})")


def find_folder(
    path_or_id: str | Path, *, allow_pickle: bool = False, revision: str | None = None
) -> Path:
    """Finds a checkpoint's folder; an id is fetched from the hub, or taken from its local cache.

    Only JSON and safetensors files of the top folder are fetched, and pickled ones with
    `allow_pickle`. No code of the repository is ever loaded.
    """
    path = check_path("the checkpoint", path_or_id, what="a folder, or a Hugging Face id")
    path = path.expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{path} is a file; pass the checkpoint's folder")
    if not is_repository_id(str(path_or_id)):
        raise ValueError(f"{path} is no folder, and no Hugging Face id like 'name/repository'")
    patterns = ["*.json", "*.safetensors", *(["*.bin", "*.pt"] if allow_pickle else [])]
    is_online = check_reachable(str(path_or_id), revision=revision)
    try:
        folder = snapshot_download(
            str(path_or_id),
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=["*/*"],
            local_files_only=not is_online,
        )
    except Exception as error:  # no network, no space, no access: the hub raises many kinds
        raise _unavailable(str(path_or_id), error, is_refused=True) from error
    return Path(folder)
