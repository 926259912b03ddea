"""The attention functions that HF models call while they run over a `SlotCache`.

HF looks a function up by name (`transformers.AttentionInterface`), and builds no mask for a name
that has no mask function; the window of the current forward arrives as the keyword `slot_window`.

Which layer has which sliding window is learned once, when a model is wrapped (`trial/probe.py`).

Legend: B rows, N tokens of a window, n queries (the last of the N), W slots attended over.
"""

import torch
from torch import Tensor
from transformers import AttentionInterface

from specdec.kernels.types import AttentionOptions
from specdec.slots.attention import attend
from specdec.slots.cache import Window
from specdec.types import Queries

ATTENTION = "specdec_slots"
"""The name under which models run."""


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slot_window: Window | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of a window of queries over the slots of its rows, as HF modules call it: with
    their `layer_idx`, their words for `AttentionOptions` (`s_aux` are sinks), the window of the
    current forward, and no mask but those of a prompt that sees itself both ways. Returns what
    `attend` does, and `None` for attention weights. Queries that are wanted as features are noted
    in the window.

    Raises:
        ValueError: the model brings a mask of its own, or drops the window on the way.
    """
    if slot_window is None or (attention_mask is not None and not slot_window.has_own_masks):
        from specdec.targets.wrappers import refuse_attention

        refuse_attention(module, attention_mask)
    window = slot_window.layer_windows.get(module.layer_idx)
    if getattr(module, "tempers_queries", False):
        from specdec.targets.queries import tempered

        query = tempered(module, query, slot_window)
    if module.layer_idx in slot_window.query_layers:
        from specdec.targets.queries import note_queries

        note_queries(slot_window, Queries(module.layer_idx), query, scaling)
    options = AttentionOptions(scaling, softcap, s_aux, window)
    function = vars(module).get("attend", attend)  # what an edit has put in its place
    return function(slot_window, query, key, value, options, attention_mask), None


AttentionInterface.register(ATTENTION, slot_attention)
