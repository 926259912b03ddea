"""What specdec makes of one model: HF's own greedy text, a refusal, or a wrong text; on a GPU, by
captured steps, if the model's can be captured.

The witness is HF: its `generate` of each row alone, and where that differs from specdec's text, its
plain forward over the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specdec import SpeculativeGenerator
from specdec.graphs.capture import CaptureError

NEW_TOKENS = 60
TIE = 1e-4
"""Two tokens are tied whose logits differ by so many standard deviations of the logits."""

EQUAL, REFUSED, WRONG, CRASHED = "equal", "refused", "wrong", "crashed"
HF_CANNOT, HF_DIFFERS = "HF cannot", "HF differs from itself"
NOT_CAPTURED = "equal by eager steps, not captured"


@dataclass(frozen=True)
class Verdict:
    """Of one model: one of the kinds above, and what is to be said of it."""

    kind: str
    remark: str = ""


Generate = Callable[[Tensor, Tensor, int], Tensor]
"""Prompts `[B, T]`, their mask and a number of tokens -> the new tokens `[B, new]`."""
Decoders = Callable[[PreTrainedModel], Iterator[tuple[str, Generate]]]


def specdec_decoders(
    model: PreTrainedModel, *, graphs: bool = False
) -> Iterator[tuple[str, Generate]]:
    """Plain decoding through specdec's loop, and prompt lookup, whose windows have several tokens.

    Raises:
        ValueError, TypeError: specdec refuses the model.
        CaptureError: its steps cannot be captured.
    """
    for name, drafter in (("no drafter", None), ("lookup", "lookup")):
        generator = SpeculativeGenerator(model, drafter, graphs=graphs)

        def generate(ids: Tensor, mask: Tensor, count: int, of=generator) -> Tensor:
            options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
            return of.generate(ids, mask, **options).sequences[:, ids.shape[1] :]

        yield name, generate


def judge(
    model: PreTrainedModel,
    prompts: list[Tensor],
    *,
    decoders: Decoders = specdec_decoders,
    new_tokens: int = NEW_TOKENS,
) -> Verdict:
    """Compares greedy texts of prompts `[T]` alone and in one ragged batch with HF's.

    Args:
        model: in eval mode.
        prompts: of any lengths.
        decoders: what is judged.
        new_tokens: of each text.
    """
    try:
        texts = [hf_text(model, prompt, new_tokens) for prompt in prompts]
        doubt = _difference_from_itself(model, prompts, texts)
    except Exception as error:  # whatever a foreign model raises
        return Verdict(HF_CANNOT, _said(error))
    try:
        for name, generate in decoders(model):
            for what, found in _runs(generate, prompts, new_tokens):
                for prompt, text, ours in zip(prompts, texts, found, strict=True):
                    place = first_wrong(model, prompt, ours, text)
                    if place is None:
                        continue
                    where = f"{name}, {what}, prompt of {len(prompt)}, token {place}"
                    is_whole = doubt and _is_top(logits_of(model, prompt, ours), ours).all()
                    return Verdict(HF_DIFFERS if is_whole else WRONG, f"{where}{doubt}")
    except (ValueError, TypeError) as error:
        return Verdict(REFUSED, f"{error}{doubt}")
    except CaptureError as error:
        return Verdict(NOT_CAPTURED, str(error))
    except Exception as error:
        return Verdict(CRASHED, _said(error))
    return Verdict(EQUAL, doubt)


def judge_captured(model: PreTrainedModel, prompts: list[Tensor], **options: int) -> Verdict:
    """As `judge`, by captured steps; by eager ones where these cannot be captured."""
    verdict = judge(model, prompts, decoders=partial(specdec_decoders, graphs=True), **options)
    if verdict.kind != NOT_CAPTURED:
        return verdict
    eager = judge(model, prompts, **options)
    return verdict if eager.kind == EQUAL else eager


def hf_text(model: PreTrainedModel, prompt: Tensor, count: int) -> Tensor:
    """The new tokens of HF's own `generate`, one row."""
    settings = GenerationConfig(
        max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
    )
    mask = torch.ones_like(prompt)[None]
    return model.generate(prompt[None], attention_mask=mask, generation_config=settings)[
        0, len(prompt) :
    ]


def first_wrong(model: PreTrainedModel, prompt: Tensor, ours: Tensor, text: Tensor) -> int | None:
    """Index of the first token of ours that is neither HF's nor tied with HF's; `None` if all are.

    Texts part at a tie: from there on each token is compared with HF's plain forward of our text.
    """
    if len(ours) != len(text):
        return min(len(ours), len(text))
    differs = (ours != text).nonzero()
    if not len(differs):
        return None
    first = int(differs[0])
    logits = logits_of(model, prompt, ours)
    is_tied = _is_top(logits, ours)
    is_tied[:first] = True
    if not _is_top(logits[first : first + 1], text[first : first + 1]).all():
        return first
    return None if is_tied.all() else int((~is_tied).nonzero()[0])


@torch.no_grad()
def logits_of(model: PreTrainedModel, prompt: Tensor, new: Tensor) -> Tensor:
    """`[new, V]` of HF's plain forward over the whole text."""
    ids = torch.cat([prompt, new])[None]
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()


def _is_top(logits: Tensor, tokens: Tensor) -> Tensor:
    """Whether each token has the highest logit, or one that is tied with it."""
    gap = logits.max(dim=-1).values - logits.gather(1, tokens[:, None])[:, 0]
    return gap <= TIE * logits.std(dim=-1)


def _difference_from_itself(
    model: PreTrainedModel, prompts: list[Tensor], texts: list[Tensor]
) -> str:
    """Where HF's plain forward over a text would have gone on otherwise than its token-by-token
    decoding did; empty if it would not.
    """
    for prompt, text in zip(prompts, texts, strict=True):
        wrong = (~_is_top(logits_of(model, prompt, text), text)).nonzero()
        if len(wrong):
            return (
                f"; HF's forward of the whole text and its steps differ from token {int(wrong[0])} "
                f"on, prompt of {len(prompt)}"
            )
    return ""


def _runs(
    generate: Generate, prompts: list[Tensor], count: int
) -> Iterator[tuple[str, list[Tensor]]]:
    """Texts of the prompts, each alone, and in one batch with padding on the left."""
    yield "alone", [generate(p[None], torch.ones_like(p)[None], count)[0] for p in prompts]
    width = max(map(len, prompts))
    pad = torch.nn.functional.pad
    ids, mask = (
        torch.stack([pad(x, (width - len(x), 0)) for x in of])
        for of in (prompts, [torch.ones_like(p) for p in prompts])
    )
    yield "in a batch", list(generate(ids, mask, count))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
