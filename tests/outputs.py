"""Whether what a run prints is what a page or a notebook shows of it."""

import re

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\w)")
_ZERO = 1e-6
"""Below it a number is what rounding in float32 leaves of 0; another processor leaves another."""


def differences(shown: str, printed: str, *, numbers: bool = True) -> list[str]:
    """What is not alike, in words; nothing if all is.

    Words and whole numbers are equal. A number with decimals may differ by one in the last of them,
    since processors round sums of floating-point numbers differently. Without `numbers` words alone
    are compared. Spaces do not count.
    """
    texts = [" ".join(text.split()) for text in (shown, printed)]
    words = [[part.strip() for part in _NUMBER.split(text)] for text in texts]
    if words[0] != words[1]:
        return [f"shown: {shown}\nprinted: {printed}"]
    if not numbers:
        return []
    pairs = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    return [f"{a} is shown, {b} is printed" for a, b in pairs if not _alike(a, b)]


def _alike(shown: str, printed: str) -> bool:
    a, b = float(shown), float(printed)
    if max(abs(a), abs(b)) < _ZERO:
        return True
    digits, _, exponent = shown.partition("e")
    decimals = len(digits.partition(".")[2])
    if not decimals and not exponent:
        return a == b
    return abs(a - b) <= 1.001 * 10.0 ** (int(exponent or 0) - decimals)
