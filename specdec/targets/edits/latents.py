"""Attention over latents (MLA: DeepSeek, Kimi, GLM, MiniCPM 3, LongCat and others).

The cache keeps one latent of a token for all heads. HF's modules make the keys and values of all
heads from those of the whole text, again in every call. A step has few queries, so the matrices
that would make keys and values are multiplied on their side: one into the queries, the other behind
the weighted sum of latents.

Source: DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434, section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.hf.foreign import foreign_attention
from specdec.hf.lookups import ATTENTION_FIELD
from specdec.kernels import AttentionOptions
from specdec.slots.attention import attend, window_mask
from specdec.slots.cache import Window
from specdec.targets.attention import ATTENTION
from specdec.targets.edits.edit import Faster
from specdec.targets.edits.indexed import INDEXED
from specdec.targets.watch import is_hooked

METHOD, MATRIX = "expand_kv", "kv_b_proj"
"""Of these modules: what makes keys and values of latents, and the layer that it calls."""


class Latents(Faster):
    """Few queries attend to the latents themselves.

    Args:
        names: of attention modules.
    """

    given_up = "keys and values are made of all latents in every step: "

    def __init__(self, names: tuple[str, ...]):
        self._names = names

    @classmethod
    def of(cls, model: PreTrainedModel) -> tuple[Latents | None, str | None]:
        """For a model, and a note on it; `None` for a model without latents."""
        found = [(name, m) for name, m in model.named_modules() if hasattr(m, METHOD)]
        names = tuple(name for name, module in found if _is_plain(module))
        if not found or foreign_attention(model):
            return None, None
        note = f"attention to latents in {len(names)} of {len(found)} layers"
        if len(names) < len(found):
            note += f"; the others have hooks, a {METHOD} or a {MATRIX} of their own"
        return (cls(names) if names else None), note

    def __call__(self, view: PreTrainedModel) -> None:
        for module in map(view.get_submodule, self._names):
            if getattr(module.config, ATTENTION_FIELD) not in (ATTENTION, INDEXED):
                raise ValueError("attention functions of others read keys and values")
            module.attend = partial(attend_latents, module, getattr(module, METHOD))
            setattr(module, METHOD, _as_they_are)

    def fits(self, model: PreTrainedModel) -> bool:
        """Whether the same layers would be chosen."""
        edit, _ = self.of(model)
        return edit is not None and edit._names == self._names


def _is_plain(module: nn.Module) -> bool:
    """Whether a module's latents become keys and values by one matrix that nobody has changed."""
    layer = getattr(module, MATRIX, None)
    if METHOD in vars(module) or type(layer) is not nn.Linear or layer.bias is not None:
        return False
    weight = layer.weight
    is_own = type(weight) is nn.Parameter and type(weight.data) is Tensor and not weight.is_meta
    return is_own and not is_hooked(layer)


def _as_they_are(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of the method: what it was given, as keys and as values."""
    return rotated, latents


def attend_latents(
    module: nn.Module,
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    window: Window,
    query: Tensor,
    rotated: Tensor,
    latents: Tensor,
    options: AttentionOptions,
    mask: Tensor | None = None,
) -> Tensor:
    """As `attend`, over latents, under a mask: those of all slots are read, a small part of what
    their keys and values would be.

    Args:
        module: whose layer `MATRIX` makes keys and values.
        expand: makes keys and values of `latents` and `rotated`, for many queries.
        window: whose last N tokens the queries are of.
        query: `[B, H, N, D + R]`.
        rotated: `[B, 1, S, R]`, the part of a key that has a position and is of all heads.
        latents: `[B, 1, S, C]`.
        options: of the layer.
        mask: additive `[B, 1, N, S]`, in place of that of the window.

    Returns:
        `[B, N, H, Dv]`.
    """
    width, layer, (*_, count, size) = module.v_head_dim, getattr(module, MATRIX), query.shape
    # The scores of few queries take less memory than keys and values of all heads would.
    is_cheaper = 3 * count <= size + width
    is_special = options.softcap is not None or options.sinks is not None
    if not is_cheaper or is_special or "forward" in vars(layer):
        return attend(window, query, *expand(latents, rotated), options, mask)
    if mask is None:
        window = window.on(query.device)
        mask = window_mask(window, count, query.dtype, options.sliding_window, options.is_causal)
    matrix = layer.weight.unflatten(0, (query.shape[1], -1))  # [H, D + Dv, C]
    of_keys, of_values = matrix.split([size - rotated.shape[3], width], dim=1)
    plain, turned = query.split([of_keys.shape[1], rotated.shape[3]], dim=-1)
    scores = _products(plain @ of_keys, latents) + _products(turned, rotated)  # [B, H, N, S]
    scores = scores * (size**-0.5 if options.scale is None else options.scale) + mask
    # Slots that nobody sees may hold anything, NaN too. What is seen and NaN has such a score.
    weights = torch.softmax(scores.masked_fill(mask == -torch.inf, -torch.inf), dim=-1)
    values = latents[:, 0].nan_to_num(0.0, 0.0, 0.0)
    summed = weights.to(values.dtype).flatten(1, 2) @ values
    return (summed.unflatten(1, weights.shape[1:3]) @ of_values.mT).transpose(1, 2)


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """`[B, H, N, S]` of queries `[B, H, N, C]` with the keys `[B, 1, S, C]` of all heads, in no
    less than float32.
    """
    flat = queries.flatten(1, 2)
    keys = keys[:, 0].mT.to(flat.dtype)
    wide = torch.promote_types(flat.dtype, torch.float32)
    if flat.dtype == wide:
        found = flat @ keys
    elif flat.is_cuda:
        found = torch.bmm(flat, keys, out_dtype=wide)
    else:
        found = flat.to(wide) @ keys.to(wide)
    return found.unflatten(1, queries.shape[1:3])
