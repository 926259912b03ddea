"""Whether a text is the model's own greedy one, up to what accelerate's autocast does to logits."""

from functools import partial

import torch


@torch.no_grad()
def logits_of(model, inputs, texts, *, autocast):
    """`[B, T, V]` in one pass over each prompt and its text; without accelerate's doing, the exact
    ones.

    Args:
        inputs: `input_ids` and `attention_mask` of prompts, padded left.
        texts: `[B, T]` new tokens.
    """
    forward, found = model if autocast else partial(type(model).forward, model), []
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), texts, strict=True)
    for ids, mask, text in rows:
        logits = forward(torch.cat([ids[mask], text])[None]).logits[0]
        found.append(logits[-len(text) - 1 : -1])
    return torch.stack(found)


def is_own_text(model, inputs, texts):
    """Whether the model's forward prefers other greedy tokens by no more than what autocast does to
    two logits.
    """
    logits = logits_of(model, inputs, texts, autocast=True)
    exact = logits_of(model, inputs, texts, autocast=False)
    rounding = float((logits - exact).abs().max())
    assert 0 < rounding < 0.5 * float(logits.std())
    chosen = logits.gather(2, texts[:, :, None])[:, :, 0]
    return float((logits.amax(dim=2) - chosen).max()) <= 2 * rounding
