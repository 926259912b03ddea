"""All kinds of heads that `specdec train` makes, by their names on the command line."""

from __future__ import annotations

from specdec.lab.training import blocks, eagle, mask_token, medusa, mtp
from specdec.lab.training.kind import Kind

KINDS: dict[str, Kind] = {
    **{**eagle.KINDS, **mask_token.KINDS, **blocks.KINDS},
    **{**mtp.KINDS, **medusa.KINDS},
}
