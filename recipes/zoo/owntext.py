"""Text in the target's own words, for its drafters to train on.

What a drafter will see is what the target writes, not what people wrote: greedy text repeats
itself, and samples wander off. So the target continues windows of the corpus, half of them
greedily and half by sampling.

Legend: B rows, T tokens of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel


@torch.inference_mode()
def continue_windows(
    target: PreTrainedModel,
    documents: list[np.ndarray],
    *,
    num_rows: int,
    prompt_tokens: int = 64,
    new_tokens: int = 192,
    batch_size: int = 1024,
    seed: int = 0,
) -> list[np.ndarray]:
    """Lets the target continue windows of the corpus.

    Args:
        target: an HF causal LM, on the device that is to generate.
        documents: token ids of each text.
        num_rows: continuations to make; every other batch greedy, the rest at temperature 1.
        prompt_tokens: of each window.
        new_tokens: at most, of each continuation.
        batch_size: rows generated together.
        seed: of the windows and the samples.

    Returns:
        Window and continuation together, up to the end-of-sequence token, for each row.
    """
    chooser = np.random.default_rng(seed)
    stream = np.concatenate(documents)
    end = target.config.eos_token_id
    made = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for start in tqdm(range(0, num_rows, batch_size), desc="the target's own text"):
            rows = min(batch_size, num_rows - start)
            places = chooser.integers(0, len(stream) - prompt_tokens, size=(rows, 1))
            prompts = stream[places + np.arange(prompt_tokens)].astype(np.int64)
            is_greedy = (start // batch_size) % 2 == 0
            ids = target.generate(
                torch.from_numpy(prompts).to(target.device),
                attention_mask=torch.ones(rows, prompt_tokens, device=target.device),
                max_new_tokens=new_tokens,
                do_sample=not is_greedy,
                top_k=0,
                pad_token_id=end,
            )
            for row in ids.cpu().numpy():
                ends = np.flatnonzero(row[prompt_tokens:] == end)
                stop = prompt_tokens + ends[0] + 1 if len(ends) else len(row)
                made.append(row[:stop].astype(stream.dtype))
    return made
