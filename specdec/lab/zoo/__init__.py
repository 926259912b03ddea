"""A small trained family of models, so that the library does something real with no download.

A deep and narrow Llama-architecture target (16 layers, 128 wide), trained on the sources of the
Python standard library and of the packages that specdec needs, and drafters for it.
`python -m recipes.zoo.recipe`, in a clone of the repository, reproduces the weights; the
`card.json` beside each says how it was made and how good it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, get_args, overload

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from specdec.arguments import check_choice, shown
from specdec.lab.zoo.corpus import heldout_prompts

if TYPE_CHECKING:
    from specdec.drafters import (
        Drafter,
        EagleDrafter,
        MaskTokenDrafter,
        ModelDrafter,
        MTPDrafter,
        Tree,
        Visible,
    )
    from specdec.drafters.proposal import Kind

__all__ = ["heldout_prompts", "load_drafter", "load_target", "load_tokenizer"]

WEIGHTS_DIR = Path(__file__).parent / "weights"
Name = Literal["model", "eagle3", "mask-token", "mtp"]
DRAFTERS = dict(zip(get_args(Name), ("draft", "eagle3", "mask_token", "mtp"), strict=True))
"""Folder of each drafter's weights, by its name."""


class DrafterOptions(TypedDict, total=False):
    """Options that all drafters of the zoo have, see `ModelDrafter` and `HeadDrafter`."""

    num_draft_tokens: int
    proposal: Kind
    draft_temperature: float | None
    tree: Tree | str | None
    visible: Visible | None


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def load_target(*, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Load the zoo's target from the package, with no network.

    Args:
        dtype: Of the parameters; they are stored in bfloat16.

    Returns:
        A Hugging Face causal LM in eval mode, with tied embeddings.

    Example:
        >>> from specdec.lab import zoo
        >>> zoo.load_target().config.num_hidden_layers
        16
    """
    return _load_model("target", check_choice("dtype", dtype, _DTYPES))


def load_tokenizer() -> PreTrainedTokenizerFast:
    """Load the byte-level tokenizer that all models of the zoo share.

    Returns:
        A fast tokenizer of 2048 tokens; `<|endoftext|>` is its bos, eos and pad.

    Example:
        >>> from specdec.lab import zoo
        >>> tokenizer = zoo.load_tokenizer()
        >>> tokenizer.decode(tokenizer("def f(x):")["input_ids"])
        'def f(x):'
    """
    folder = _folder("target", holding="tokenizer.json")
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


@overload
def load_drafter(
    name: Literal["model"],
    target: LlamaForCausalLM | None = None,
    **options: Unpack[DrafterOptions],
) -> ModelDrafter:
    """An independent one-layer draft LM."""


@overload
def load_drafter(
    name: Literal["eagle3"], target: LlamaForCausalLM, **options: Unpack[DrafterOptions]
) -> EagleDrafter:
    """An EAGLE-3 head."""


@overload
def load_drafter(
    name: Literal["mask-token"], target: LlamaForCausalLM, **options: Unpack[DrafterOptions]
) -> MaskTokenDrafter:
    """A P-EAGLE head with a Markov correction."""


@overload
def load_drafter(
    name: Literal["mtp"], target: LlamaForCausalLM, **options: Unpack[DrafterOptions]
) -> MTPDrafter:
    """Three prediction modules."""


@overload
def load_drafter(
    name: str, target: LlamaForCausalLM | None = None, **options: Unpack[DrafterOptions]
) -> Drafter:
    """The drafter of a name that is known when the program runs."""


def load_drafter(
    name: str,
    target: LlamaForCausalLM | None = None,
    *,
    num_draft_tokens: int = 4,
    proposal: Kind = "sample",
    draft_temperature: float | None = None,
    tree: Tree | str | None = None,
    visible: Visible | None = None,
) -> Drafter:
    """Load one of the zoo's trained drafters.

    Args:
        name: "model", an independent one-layer draft LM distilled from the target; "eagle3", an
            EAGLE-3 head on three of the target's hidden states; "mask-token", a P-EAGLE head on the
            same, which drafts all tokens in one pass, with a Markov correction that was trained
            alone (without: `specdec.lab.training.mask_token.with_correction(head, None)`);
            or "mtp", three prediction modules on the target's last hidden state.
        target: The model that `load_target` gave. Heads need it; "model" takes only its dtype and
            device.
        num_draft_tokens, proposal, draft_temperature, tree, visible: As for the drafter's class.

    Returns:
        A drafter, ready for the generator.

    Example:
        >>> from specdec.lab import zoo
        >>> drafter = zoo.load_drafter("eagle3", zoo.load_target(), num_draft_tokens=4)
    """
    if not isinstance(name, str) or name not in DRAFTERS:
        raise ValueError(
            f"the zoo has no drafter {shown(name)}; expected one of {', '.join(DRAFTERS)}"
        )
    options = {"proposal": proposal, "draft_temperature": draft_temperature, "tree": tree}
    options |= {"num_draft_tokens": num_draft_tokens, "visible": visible}
    # Imported here, so that models and prompts load without the rest of the library.
    from specdec.checkpoints.drafter import load
    from specdec.checkpoints.families import FAMILIES
    from specdec.drafters import ModelDrafter
    from specdec.hf.forward import device_of

    if target is not None:
        for attribute in ("dtype", "device"):  # of models, and of targets over them
            if getattr(target, attribute, None) is None:
                raise TypeError(f"target must be an HF model, got {shown(target)}")
        # A model that is offloaded says meta, and computes elsewhere.
        device = device_of(target) if isinstance(target, torch.nn.Module) else target.device
    if name == "model":
        draft = _load_model(DRAFTERS[name], torch.float32 if target is None else target.dtype)
        return ModelDrafter(draft if target is None else draft.to(device), **options)
    if target is None:
        raise ValueError(f"the drafter {name!r} reads its target's hidden states; pass the target")
    folder = _folder(DRAFTERS[name], holding="model.safetensors")
    drafter = load(folder, target, families=tuple(FAMILIES.values()), **options)
    return drafter.to(device, target.dtype)


def _folder(name: str, *, holding: str) -> Path:
    """Return a model's folder inside the package, which must hold a certain file."""
    folder = WEIGHTS_DIR / name
    if not (folder / holding).is_file():
        raise FileNotFoundError(
            f"no {holding} in {folder}; reinstall the package, or in a clone make it anew with "
            "`python -m recipes.zoo.recipe`"
        )
    return folder


def _load_model(name: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """Load a model of the zoo in eval mode, without a progress bar for a few megabytes."""
    folder = _folder(name, holding="model.safetensors")
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    finally:
        if shows_progress:
            logging.enable_progress_bar()
    return model.eval()
