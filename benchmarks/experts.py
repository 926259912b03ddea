"""What a window of tokens costs a mixture of experts: each token may bring other experts, whose
weights are read for it.

    PYTHONPATH=. python benchmarks/experts.py --target PATH --draft-lengths 1 3 7 --batch-sizes 1 8

The target writes texts, and the experts that windows of K + 1 tokens of them touch are counted.

Legend: n tokens of a window (K + 1 of a chain), B rows, E experts of a layer, k chosen per token.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.generator import SpeculativeGenerator
from specdec.hf.layers import EXPERTS
from specdec.lab.evaluation import evaluate, own_prompts, read_prompts
from specdec.lab.show.table import Table, Tabular
from specdec.loading import load_target


def expected_experts(num_experts: int, per_token: int, tokens: int) -> float:
    """How many experts of a layer some tokens touch when each chooses independently and evenly,
    `E (1 - (1 - k / E)^n)`. Neighbouring tokens of a text choose alike, so they touch fewer.

    Args:
        num_experts: E.
        per_token: k.
        tokens: n of all rows together.

    Example:
        >>> round(expected_experts(128, 8, 4), 1)
        29.1
    """
    return num_experts * (1 - (1 - per_token / num_experts) ** tokens)


@dataclass(frozen=True, eq=False, repr=False)
class ExpertCosts(Tabular):
    """How many experts windows of text touch, and what a forward reads for them.

    Args:
        num_experts: E, of a layer.
        per_token: k.
        touched: by (rows, tokens of each row's window), the mean over layers and places in texts.
        read_bytes: by the same, weights that a forward reads: all but the experts that are not
            touched and the table of input embeddings, of which it reads a line per token.
    """

    num_experts: int
    per_token: int
    touched: dict[tuple[int, int], float]
    read_bytes: dict[tuple[int, int], float]

    def slowdown(self, num_draft_tokens: int, rows: int = 1) -> float:
        """Bytes of a step that verifies K draft tokens over those of a plain step: what its time
        grows by where reading weights is all that it costs, and the acceptance length below which
        drafting cannot pay, however cheap the drafter is.

        Args:
            num_draft_tokens: K, whose window was measured.
            rows: B.
        """
        return self.read_bytes[rows, num_draft_tokens + 1] / self.read_bytes[rows, 1]

    def tables(self) -> list[Table]:
        """A line per rows and K."""
        header = ["rows", "K", "experts", "if even", "GB read", "x plain"]
        rows = []
        for (batch, window), touched in self.touched.items():
            even = expected_experts(self.num_experts, self.per_token, batch * window)
            read = self.read_bytes[batch, window]
            cells = [f"{touched:.1f}", f"{even:.1f}", f"{read / 1e9:.3g}"]
            slowdown = f"{self.slowdown(window - 1, batch):.2f}"
            rows.append([str(batch), str(window - 1), *cells, slowdown])
        notes = (
            f"Of {self.num_experts} experts of a layer, {self.per_token} for each token; mean over "
            "layers and windows of the texts.",
            "A draft pays where its acceptance length is above the last column, if reading weights "
            "is all that a step costs.",
        )
        return [Table(header, rows, notes)]

    def records(self) -> list[dict[str, Any]]:
        """One per rows and K."""
        return [
            {
                "rows": batch,
                "num_draft_tokens": window - 1,
                "experts": touched,
                "experts_if_even": expected_experts(
                    self.num_experts, self.per_token, batch * window
                ),
                "read_bytes": self.read_bytes[batch, window],
                "slowdown": self.slowdown(window - 1, batch),
            }
            for (batch, window), touched in self.touched.items()
        ]


@torch.no_grad()
def expert_costs(
    model: PreTrainedModel,
    texts: Iterable[Sequence[int] | Tensor],
    *,
    draft_lengths: Iterable[int] = (1, 2, 3, 4, 6, 8),
    batch_sizes: Iterable[int] = (1, 8),
    draws: int = 256,
) -> ExpertCosts:
    """Counts the experts that windows of texts touch, from one plain forward of each text.

    Draft tokens that will be rejected are not of the text, and choose less alike than its own: a
    step touches at least as many, and at most about the even number.

    Args:
        model: a target with experts.
        texts: ids of texts as the target writes them, at least as long as the largest window.
        draft_lengths: K; a window has K + 1 tokens.
        batch_sizes: rows, whose windows lie in texts and places of their own.
        draws: windows per size, at random but always the same.

    Raises:
        ValueError: the model has no experts that Hugging Face's shared code runs, or layers with
            other numbers of them, or no text is long enough.

    """
    experts = list(experts_of(model))
    if not experts:
        raise ValueError(
            f"{type(model).__name__} has no experts of Hugging Face's shared kind; its steps read "
            "all weights, whatever is drafted"
        )
    counts = {each.num_experts for each in experts}
    if len(counts) > 1:
        raise ValueError(f"layers have other numbers of experts each: {sorted(counts)}")
    windows = [1, *(1 + k for k in draft_lengths)]
    chosen = [ids for text in texts if len(ids := _chosen(model, experts, text)) >= max(windows)]
    if not chosen:
        raise ValueError(f"no text has the {max(windows)} tokens of the largest window")
    (num_experts,), per_token = counts, chosen[0].shape[-1]
    own_bytes = np.array([_bytes(each.parameters()) for each in experts])
    rest = _bytes(model.parameters()) - own_bytes.sum() - _read_by_line(model)
    touched, read = {}, {}
    for rows in batch_sizes:
        for window in windows:
            found = _touched(chosen, rows, window, num_experts, draws)
            touched[rows, window] = float(found.mean())
            read[rows, window] = float(rest + (own_bytes * found / num_experts).sum())
    return ExpertCosts(num_experts, per_token, touched, read)


def experts_of(model: nn.Module) -> Iterator[nn.Module]:
    """Modules of all experts of a layer, called with (states, ids of experts, weights)."""
    for module in model.modules():
        if all(hasattr(module, name) for name in (*EXPERTS, "num_experts")):
            yield module


def _chosen(model: PreTrainedModel, experts: list[nn.Module], text: Any) -> np.ndarray:
    """`[tokens, layers, k]` experts of every token of a text."""
    found: dict[int, Tensor] = {}

    @contextmanager
    def watched(layer: int, module: nn.Module) -> Iterator[None]:
        def keep(module, args):
            found[layer] = args[1]

        handle = module.register_forward_pre_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    ids = torch.as_tensor(list(text), device=model.device)
    with ExitStack() as stack:
        for layer, module in enumerate(experts):
            stack.enter_context(watched(layer, module))
        model(ids[None], use_cache=False)
    return torch.stack([found[layer].cpu() for layer in range(len(experts))], dim=1).numpy()


def _touched(
    chosen: list[np.ndarray], rows: int, window: int, num_experts: int, draws: int
) -> np.ndarray:
    """`[layers]` mean number of experts over random windows of so many rows."""
    places = [(text, i) for text in chosen for i in range(len(text) - window + 1)]
    random, sums = np.random.default_rng(0), np.zeros(chosen[0].shape[1])
    for _ in range(draws):
        hit = np.zeros((len(sums), num_experts), dtype=bool)
        for place in random.integers(len(places), size=rows):
            text, start = places[place]
            ids = text[start : start + window]  # [n, layers, k]
            hit[np.arange(len(sums))[None, :, None], ids] = True
        sums += hit.sum(axis=1)
    return sums / draws


def _bytes(weights: Iterable[Tensor]) -> int:
    return sum(weight.nbytes for weight in weights)


def _read_by_line(model: PreTrainedModel) -> int:
    """Bytes of the input embeddings, unless the head is the same table and reads all of it."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is table.weight
    return 0 if is_tied else _bytes(table.parameters())


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table of a target and of texts that it writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", required=True, help="a folder or a Hugging Face id")
    parser.add_argument("--prompts", help="file of prompts; specdec's own by default")
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=(1, 2, 3, 4, 6, 8))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(argv)
    prompts = own_prompts() if given.prompts is None else read_prompts(given.prompts)
    model, tokenizer = load_target(given.target, device=given.device)
    options = {"tokenizer": tokenizer, "max_new_tokens": given.max_new_tokens}
    rows = evaluate(SpeculativeGenerator(model, None), prompts, **options).rows
    texts = [row.new_tokens for row in rows]
    sizes = {"draft_lengths": given.draft_lengths, "batch_sizes": given.batch_sizes}
    print(expert_costs(model, texts, **sizes))


if __name__ == "__main__":
    main()
