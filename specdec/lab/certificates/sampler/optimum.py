"""How many tokens the best lossless rule accepts, by a linear program.

Let I(u) be the probability that what is accepted begins with the text u; of the empty text it is 1.
What a rule emits, completed by the target, is the target's if and only if it accepts u alone and
emits y after it with probability `I(u) p(y | u) - I(uy)`. So the lossless rules are the ways to end
each draft at one of its nodes, or at the root, for which none of these is negative; and the mean
number accepted is the sum of I over all texts.

Legend: see `paths`; C columns of the program, a row of paths and a row of its window each.
"""

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_array
from torch import Tensor

from specdec.lab.certificates.sampler.paths import Paths


def most_accepted(paths: Paths) -> Tensor:
    """`[W]`: the largest mean number of accepted tokens in each problem, over all lossless rules.

    Exact to about 1e-7, the tolerance of the solver.
    """
    problems, depths = paths.problems, torch.tensor(paths.depths, device="cpu")
    count, nodes = paths.prefix.shape
    valid = torch.full((count,), nodes - 1, device="cpu") if paths.valid is None else paths.valid
    row, node = (torch.arange(nodes, device="cpu") <= valid[:, None]).nonzero(as_tuple=True)  # [C]
    problem, depth, prefix = paths.problem[row], depths[node], paths.prefix[row, node]
    if not depth.any():  # nothing is drafted
        return torch.zeros(len(problems), dtype=torch.float64, device="cpu")
    entries, first, vocab = [], 0, problems.vocab_size
    for d in range(1, int(depths.max()) + 1):  # I(uy) - I(u) p(y | u) <= 0, uy of d tokens
        texts = vocab**d
        reaches = (depth >= d).nonzero()[:, 0]
        text = prefix[reaches] // vocab ** (depth[reaches] - d)
        entries.append(
            (
                first + problem[reaches] * texts + text,
                reaches,
                torch.ones(len(text), dtype=torch.float64, device="cpu"),
            )
        )
        above = (depth >= d - 1).nonzero()[:, 0]
        text = prefix[above] // vocab ** (depth[above] - d + 1)
        chance = problems.target[d - 1][problem[above], text]  # [., V]
        line = first + problem[above] * texts + text * vocab
        line = line[:, None] + torch.arange(vocab, device="cpu")
        entries.append((line.flatten(), above.repeat_interleave(vocab), -chance.flatten()))
        first += len(problems) * texts
    lines, columns, values = (torch.cat(x).numpy() for x in zip(*entries, strict=True))
    found = linprog(
        -depth.numpy(),
        A_ub=coo_array((values, (lines, columns)), shape=(first, len(row))).tocsr(),
        b_ub=np.zeros(first),
        A_eq=coo_array((np.ones(len(row)), (row.numpy(), np.arange(len(row))))).tocsr(),
        b_eq=paths.weight.numpy(),
    )
    accepted = torch.from_numpy(found.x) * depth
    return torch.zeros(len(problems), dtype=torch.float64, device="cpu").index_add(
        0, problem, accepted
    )
