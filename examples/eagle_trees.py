"""The rule of SafeAILab/EAGLE as a sampler for trees, for `verdicts.py`.

EAGLE drafts the most likely tokens of its head, several after each node. Nothing is drawn, so the
rule takes each candidate as drawn with probability 1: it accepts a candidate with the target's
probability of it, and after a rejection sets that probability to 0 and renormalises.

Legend: B rows, C candidates (leaves of a tree), D depth, V vocabulary.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from specdec.kernels import draw
from specdec.samplers import LogitsFilter, Sampler, StepNoise, Stream
from specdec.types import PAD_TOKEN, Draft, Verdict


class EagleSampler(Sampler):
    """`evaluate_posterior`, shown the trees of the certificate one by one.

    Args:
        rule_with: makes the rule, given what stands in for the module `random`.
    """

    lossless, takes_trees, uses_draft_probs = False, True, False

    def __init__(self, rule_with: Callable[[SimpleNamespace], Callable]):
        super().__init__()
        self.rule = rule_with(SimpleNamespace(random=self._uniform))

    def accept(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: StepNoise
    ) -> Verdict:
        """The rule is shown logits after temperature and truncation."""
        return self._verdict(draft, logits_filter(target_logits).log(), noise)

    def accept_greedily(self, draft: Draft, target_logits: Tensor) -> Verdict:
        """The rule's own path for temperature 0."""
        return self._verdict(draft, target_logits, None)

    def _verdict(self, draft: Draft, logits: Tensor, noise: StepNoise | None) -> Verdict:
        processor = None if noise is None else lambda _, scores: scores
        tokens = torch.full((len(logits), draft.depth + 1), PAD_TOKEN)
        path, counts = torch.zeros_like(tokens), torch.zeros(len(tokens), dtype=torch.long)
        last = logits.new_empty(len(logits), logits.shape[-1])
        for row in range(len(logits)):
            nodes = candidates_of(draft, row)
            ids = torch.nn.functional.pad(draft.tokens[row], (1, 0))  # the root is not read
            shown = ids[nodes.clamp(min=0)].masked_fill(nodes < 0, -1)
            self._nodes = nodes.tolist()
            self._uniforms = None if noise is None else noise.uniform(Stream.ACCEPT)[row].tolist()
            best, count, last[row] = self.rule(logits[row, nodes.clamp(min=0)], shown, processor)
            counts[row], path[row] = count, nodes[best].clamp(min=0)
            tokens[row, :count] = shown[best, 1 : count + 1]
        extra = last.argmax(-1)
        if noise is not None:
            extra = draw(last, noise.uniform(Stream.RESAMPLE)[:, 0])
        tokens.scatter_(1, counts[:, None], extra[:, None])
        return Verdict(tokens, counts, draft.num_valid, path=path)

    def _uniform(self) -> float:
        """The uniform of the node that the rule decides on as it calls `random.random()`: place `i`
        of candidate `j`, its own names.
        """
        there = sys._getframe(1).f_locals
        return self._uniforms[self._nodes[there["j"]][there["i"]] - 1]


def candidates_of(draft: Draft, row: int) -> Tensor:
    """`[C, D + 1]`: the rows of the window on the way to each leaf, padded with -1, as EAGLE's
    `retrieve_indices`.

    The most likely tokens are different ones. Where the certificate drafts a token twice among
    siblings, the second one, and what follows it, is left out.
    """
    ids, parents = draft.tokens[row].tolist(), draft.window_parents[row].tolist()
    paths, seen = {0: [0]}, set()
    for node, is_valid in enumerate(draft.is_valid[row].tolist(), 1):
        above, token = parents[node - 1], ids[node - 1]
        if is_valid and above in paths and (above, token) not in seen:
            seen.add((above, token))
            paths[node] = [*paths[above], node]
    leaves = [path for node, path in paths.items() if node not in {above for above, _ in seen}]
    return torch.tensor([path + [-1] * (draft.depth + 1 - len(path)) for path in leaves])
