"""New heads of any family: layers like the target's, weights that depend on a seed alone."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.arguments import check_integer
from specdec.drafters.head.layer_config import LayerConfig
from specdec.lab.training.data import begun

Head = TypeVar("Head", bound=nn.Module)


def layer_like(
    target: PreTrainedModel, *, mlp_width: int | None = None, windows: tuple[int | None, ...] = ()
) -> LayerConfig:
    """A decoder layer of the target's width and attention heads, and of its MLP's width or another,
    with the sliding windows of `LayerConfig.windows`. The rotary base is 10000 whatever the
    target's, as that is what some engines assume.
    """
    if mlp_width is not None:
        check_integer("mlp_width", mlp_width, 1)
    theirs = target.config.get_text_config()
    heads = theirs.num_attention_heads
    own_width = getattr(theirs, "intermediate_size", None) or 4 * theirs.hidden_size
    return LayerConfig(
        hidden_size=theirs.hidden_size,
        intermediate_size=mlp_width or own_width,
        num_heads=heads,
        num_kv_heads=getattr(theirs, "num_key_value_heads", None) or heads,
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // heads,
        rms_norm_eps=getattr(theirs, "rms_norm_eps", 1e-6),
        max_position_embeddings=getattr(theirs, "max_position_embeddings", None) or 2048,
        windows=windows,
    )


def usual_hidden_states(target: PreTrainedModel) -> tuple[int, int, int]:
    """The features of most heads: hidden states 2, L / 2 and L - 3 of L layers; nearer together
    where L < 7. `ValueError` for fewer than three layers.
    """
    count = target.config.get_text_config().num_hidden_layers
    if count < 3:
        raise ValueError(
            f"the head reads three hidden states and the target has {count} layers; train 'eagle1' "
            "or 'mtp'"
        )
    return (2, count // 2, count - 3) if count >= 7 else (1, 2, max(3, count - 1))


def with_layer(head: Head, **fields: Any) -> Head:
    """A head of the same weights whose layers have another rope or other sliding windows, so that
    it drafts in texts that are longer than those it was trained on.

    Args:
        head: with decoder layers, trained or not; it is left as it was.
        fields: of its `LayerConfig`: `windows=(512,)`, one for each layer, or `rope={...}`.

    Raises:
        TypeError, ValueError: a field that does not exist, or cannot be right.

    Example:
        >>> from specdec import EagleDrafter, zoo
        >>> target = zoo.load_target()
        >>> head = with_layer(zoo.load_drafter("eagle3", target).head, windows=(512,))
        >>> drafter = EagleDrafter(head, target)
    """
    config = replace(head.config, layer=replace(head.config.layer, **fields))
    with drawn_from(0):
        new = type(head)(config, head.target_ids)
    new.load_state_dict(head.state_dict())
    return new.to(head.device, head.dtype).train(head.training)


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Modules that are made inside are on the CPU and in float32, whatever torch's defaults are,
    and depend on the seed alone: torch's own initialisation draws from the global generator, which
    is left as it was.
    """
    check_integer("seed", seed, 0, 2**63 - 1)
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with torch.random.fork_rng([]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.set_default_dtype(dtype)


def untrained(make: Callable[[], Head], target: PreTrainedModel, *, seed: int) -> Head:
    """The head that `make` builds on the CPU, with weights that depend on the seed alone: every
    `nn.Linear` is drawn again, and matrices of HF's own modules, which HF leaves as the memory was.
    A vocabulary head of its own is copied from the target's: the rows of the ids that the head can
    propose.
    """
    with drawn_from(seed):
        head = make()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, module in head.named_modules():
            if isinstance(module, nn.Linear):
                is_write = name.endswith(("o_proj", "down_proj"))  # into the residual stream
                std = 0.02 if is_write else module.in_features**-0.5
                module.weight.normal_(std=std, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
            elif type(module).__module__.startswith("transformers."):  # experts and their router
                for own, weight in module.named_parameters(recurse=False):
                    if weight.dim() > 1:
                        std = 0.02 if own == "down_proj" else weight.shape[-1] ** -0.5
                        weight.normal_(std=std, generator=generator)
        if hasattr(head, "lm_head"):
            theirs, ids = target.get_output_embeddings().weight, head.target_ids
            head.lm_head.weight.copy_(theirs if ids is None else theirs[ids.to(theirs.device)])
    return head


@torch.no_grad()
def frequent_ids(
    target: PreTrainedModel,
    documents: Sequence[np.ndarray],
    count: int,
    *,
    beginning: Sequence[int] = (),
    num_tokens: int = 2**17,
    row_tokens: int = 512,
    progress: Callable[[Sequence[Tensor]], Iterable[Tensor]] = iter,
) -> Tensor:
    """The ids that a head of a smaller vocabulary should be able to propose.

    Half of an id's score is its frequency in the data. The other half is its frequency in the
    target's own text, as expected over contexts of the data: the mean of the target's next-token
    probabilities. End-of-sequence ids always take part.

    Args:
        target: where it is to run.
        documents: ids of each.
        count: Vd.
        beginning: as for `PackedStream`, of the rows that the target reads.
        num_tokens: of the data that the target reads.
        row_tokens: of each row that it reads.
        progress: wraps these rows, `tqdm` for instance.

    Returns:
        `[Vd]` int64, ascending, on the CPU.

    Example:
        >>> from specdec.lab import zoo
        >>> frequent_ids(zoo.load_target(), [np.arange(50, 90)], 100).shape
        torch.Size([100])
    """
    config = target.config.get_text_config()
    check_integer("the number of draft ids", count, 1, config.vocab_size)
    stream = torch.from_numpy(np.concatenate(list(documents)).astype(np.int64))
    of_data = stream.bincount(minlength=config.vocab_size).double()
    rows = stream[: num_tokens // row_tokens * row_tokens].split(row_tokens)
    of_target = torch.zeros_like(of_data)
    for row in progress(rows):
        ids = torch.from_numpy(begun(row.numpy(), beginning))[None].to(target.device)
        logits = target(input_ids=ids, use_cache=False).logits[0]
        of_target += logits.float().softmax(dim=-1).sum(dim=0).double().cpu()
    scores = of_data / of_data.sum() + of_target / of_target.sum()
    ends = config.eos_token_id
    if ends is not None:
        scores[torch.tensor(ends, device="cpu")] = torch.inf
    return scores.argsort(descending=True, stable=True)[:count].sort().values
