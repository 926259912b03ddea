"""What is said to those who take a `GenerationResult` for a tensor or a list."""

from typing import Any, NoReturn

from torch import Tensor

from specdec.arguments import shown


def refuse_index(index: Any) -> NoReturn:
    """Raises `TypeError` for `result[index]`."""
    raise TypeError(
        f"GenerationResult is no tensor and no list, got [{shown(index)}]; result.sequences"
        f"[{shown(index)}] holds ids, and result.texts[row] those of a row's new tokens"
    )


def refuse_length() -> NoReturn:
    """Raises `TypeError` for `len(result)`."""
    raise TypeError(
        "GenerationResult has no length; len(result.lengths) counts rows, and "
        "result.lengths holds the new tokens of each"
    )


def refuse_name(result: Any, name: str) -> NoReturn:
    """Raises `AttributeError` for `result.name`."""
    advice = f"it has {', '.join([*result.__dataclass_fields__, 'stats', 'origins'])}"
    if hasattr(Tensor, name):
        advice = f"result.sequences.{name} is that of the ids"
    raise AttributeError(f"GenerationResult has no {name!r}; {advice}", name=name, obj=result)
