"""The versions of transformers that were tried."""

import transformers
from packaging.version import Version

TRIED = "5.17.0", "5.24.0"
"""The oldest and the newest version that the tests have passed on."""


def newer_than_tried() -> str:
    """A remark for messages, where the installed version is newer than those that were tried."""
    newest = TRIED[1]
    if Version(transformers.__version__) <= Version(newest):
        return ""
    return (
        f" (transformers {transformers.__version__} is newer than {newest}, the newest tried with "
        "this version of specdec)"
    )
