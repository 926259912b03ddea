"""The accepted path of a tree, as the host reads it.

Legend: B rows, D tokens of the longest path.
"""

from collections.abc import Mapping

import numpy as np


def along_path(told: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of trees the rows of the window on the path `[B, D + 1]`, the draft tokens there `[B, D]`,
    and which of them do not follow the one before.
    """
    path, parents, drafted = told["path"], told["parents"], told["drafted"]
    width = drafted.shape[1]
    rows, nodes = path.clip(0, width), (path[:, 1:] - 1).clip(0, width - 1)
    follows = np.take_along_axis(parents, nodes, axis=1) + 1 == path[:, :-1]
    is_off = ~follows | (path[:, 1:] < 1) | (path[:, 1:] > told["num_valid"][:, None])
    return rows, np.take_along_axis(drafted, nodes, axis=1), is_off
