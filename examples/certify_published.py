"""A published rule for trees, written down and certified.

    python examples/certify_published.py

Hierarchical Speculative Decoding (Zhou et al., arXiv:2601.05724) is said to be lossless, and to
accept 12 % more of the trees of EAGLE-3 than their own rule does. Those trees are the likeliest
tokens: point masses. Accepting a node v of such a tree says that the text begins with path(v). So
whatever rule is lossless has

    E[accepted] <= sum over nodes v of P_target(path(v)),

and EAGLE's rule (try child after child with its share of what is left), like taking the child that
equals the target's own draw, has exactly that. A rule that accepts more there is not lossless.

The rule, as its authors apply it to these trees (their EAGLE-3H, told here in other words), takes
the paths of the tree one after another. With point masses, and the target's probability r_i of the
first i tokens of a path, given what was accepted before:

1. The whole path is accepted with probability r_n.
2. Otherwise one goes back from its last token. With the capped probability a of all tokens before
   token x, the excess max(0, a p - 1_x) has mass a (1 - p(x)) and the deficit 1 - a p(x). Their
   ratio is the chance to stay: then all before x is accepted. At a = 1, and at the first token, one
   always stays.
3. The next path that begins with what is accepted goes on with the normalised excess in the place
   of the target's distribution; a goes on from what it is there.

For one path that is exact. But in 3, what is accepted was paid for: carried on, a < 1 makes the
chance to stay too small, so a second path of two tokens or more after a common beginning is left
too early, and the text goes on with another token too often.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod

import torch
from torch import Tensor

from specdec import BlockSampler, CouplingSampler, RejectionSampler, Sampler, certify
from specdec.kernels import draw
from specdec.samplers import LogitsFilter, StepNoise, Stream
from specdec.types import PAD_TOKEN, Draft, Verdict

SHAPES = ((-1, 0, 0, -1), (-1, 0, 1, 0, 3))
"""Without and with two paths that part before their last but one token."""
Law = tuple[float, ...]


class HierarchicalSampler(Sampler):
    """The rule on trees of point masses."""

    lossless = False  # see the certificate
    takes_trees = True

    def accept(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: StepNoise
    ) -> Verdict:
        """Row by row: one of the outcomes, in proportion to their chances."""
        laws, parents = logits_filter(target_logits).tolist(), (draft.window_parents - 1).tolist()
        uniforms, last = noise.uniform(Stream.ACCEPT)[:, 0], noise.uniform(Stream.RESAMPLE)[:, 0]
        counts = draft.is_valid.sum(dim=1).tolist()
        rows = torch.zeros(len(laws), draft.depth + 1, dtype=torch.long)
        tokens, num_accepted = torch.full_like(rows, PAD_TOKEN), torch.zeros(len(laws)).long()
        for row, valid in enumerate(counts):
            drafted = tuple(draft.tokens[row, :valid].tolist())
            table = tuple(map(tuple, laws[row]))
            found = outcomes(tuple(parents[row][:valid]), drafted, table)
            chances = torch.tensor([chance for chance, _, _ in found], dtype=torch.float64)
            _, path, weights = found[int(draw(chances, uniforms[row]))]
            extra = int(draw(torch.tensor(weights, dtype=torch.float64), last[row]))
            rows[row, 1 : len(path) + 1] = torch.tensor(path) + 1
            tokens[row, : len(path) + 1] = torch.tensor([*(drafted[i] for i in path), extra])
            num_accepted[row] = len(path)
        return Verdict(tokens, num_accepted, draft.num_valid, path=rows)


@cache
def outcomes(
    parents: tuple[int, ...], tokens: tuple[int, ...], laws: tuple[Law, ...]
) -> list[tuple[float, tuple[int, ...], Law]]:
    """(chance, accepted nodes, distribution of the extra token) of all that can happen.

    Args:
        parents: of the nodes, -1 for the root.
        tokens: of the nodes.
        laws: the target's, after the root and after each node.
    """
    paths = [path_to(leaf, parents) for leaf in range(len(parents)) if leaf not in parents]

    def visit(
        chance: float, number: int, done: tuple[int, ...], law: Law, carried: float
    ) -> Iterator[tuple[float, tuple[int, ...], Law]]:
        """From the path of this number on, when `done` is accepted and `law` is what is left."""
        fitting = (i for i in range(number, len(paths)) if paths[i][: len(done)] == done)
        number = next(fitting, len(paths))
        if number == len(paths):
            yield chance, done, law
            return
        rest = paths[number][len(done) :]
        here = [law, *(laws[node + 1] for node in rest)]
        shares = [of[tokens[node]] for of, node in zip(here, rest, strict=False)]
        whole = prod(shares)
        yield chance * whole, done + rest, here[-1]
        chance *= 1 - whole
        for i in reversed(range(len(rest))):
            before = carried * prod(shares[:i])
            always = i == 0 or before >= 1
            stays = 1.0 if always else before * (1 - shares[i]) / (1 - before * shares[i])
            left = without(here[i], tokens[rest[i]])
            yield from visit(chance * stays, number + 1, done + rest[:i], left, before)
            chance *= 1 - stays

    return [outcome for outcome in visit(1.0, 0, (), laws[0], 1.0) if outcome[0] > 0]


def path_to(node: int, parents: tuple[int, ...]) -> tuple[int, ...]:
    """The nodes from the root to this one."""
    return () if node < 0 else (*path_to(parents[node], parents), node)


def without(law: Law, token: int) -> Law:
    """The distribution without a token; all of it where nothing else is left."""
    rest = [p if i != token else 0.0 for i, p in enumerate(law)]
    return tuple(p / sum(rest) for p in rest) if sum(rest) > 0 else law


def expected(parents: tuple[int, ...], tokens: tuple[int, ...], law: Law) -> tuple[float, float]:
    """Tokens that the rule accepts on average, and the bound, where every distribution is one."""
    found = outcomes(parents, tokens, (law,) * (len(parents) + 1))
    paths = (path_to(node, parents) for node in range(len(parents)))
    bound = sum(prod(law[tokens[node]] for node in path) for path in paths)
    return sum(chance * len(path) for chance, path, _ in found), bound


def main(num_draws: int = 4096) -> None:
    """Certifies the rule on each shape, beside three that are lossless."""

    def of_point_masses(batches: list) -> list:
        return [
            problems for problems in batches if problems.is_point_mass and not problems.is_chain
        ]

    options = {"sizes": ((3, 1, 12),), "num_draws": num_draws, "progress": of_point_masses}
    for shape in SHAPES:
        rules = HierarchicalSampler(), BlockSampler(), RejectionSampler(), CouplingSampler()
        for rule in rules:
            print(certify(rule, trees=(shape,), **options))
        tokens = tuple(shape[:node].count(parent) for node, parent in enumerate(shape))
        accepted, bound = expected(shape, tokens, (0.6, 0.3, 0.1))
        print(f"parents {shape}: {accepted:.4f} accepted of at most {bound:.4f}\n")


if __name__ == "__main__":
    main()
