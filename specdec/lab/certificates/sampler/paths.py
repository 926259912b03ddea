"""Every path that a drafter can take through some problems, as one batch for a sampler.

Legend: R rows (paths), and see `problems`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.graphs.rows import map_tensors
from specdec.kernels.verify.paths import PathDraft
from specdec.lab.certificates.sampler.problems import Problems
from specdec.loop.faults import check_decisions
from specdec.loop.step import check_verdict
from specdec.samplers import LogitsFilter, ScriptedNoise, Stream
from specdec.tree_shape import depths_of
from specdec.types import PAD_TOKEN, Draft, Verdict

Decide = Callable[[Draft, Tensor, LogitsFilter, ScriptedNoise], Verdict]
"""A sampler."""


class Paths:
    """One batch row per problem and draft: every path that a drafter can take, or every tree.

    Args:
        problems: what to draft from.
        device: where samplers run.
        with_impossible: also drafts that have probability 0 under the draft distribution.

    Attributes:
        problem: `[R]`.
        prefix: `[R, N]` number, in base V, of the prefix that ends at each row of the window: the
            root, whose prefix is empty, and each token.
        tokens: `[R, K]`, padded behind the last drafted one.
        weight: `[R]` probability of the draft under the draft distribution.
    """

    def __init__(
        self,
        problems: Problems,
        *,
        device: torch.device | str = "cpu",
        with_impossible: bool = False,
    ):
        self.problems, self.device = problems, device
        width, vocab, parents = (
            problems.num_draft_tokens,
            problems.vocab_size,
            problems.window_parents,
        )
        code = torch.arange(vocab**width, device="cpu").repeat(len(problems))
        problem = torch.arange(len(problems), device="cpu").repeat_interleave(vocab**width)
        tokens = code[:, None] // vocab ** torch.arange(width, device="cpu").flip(0) % vocab
        valid = torch.tensor(problems.num_valid or [width] * len(problems), device="cpu")[problem]
        is_beyond = torch.arange(width, device="cpu") >= valid[:, None]
        weight = torch.ones(len(code), dtype=torch.float64, device="cpu")
        depths = self.depths = depths_of(above - 1 for above in parents)
        prefixes, laws = [torch.zeros_like(code)], []
        for i, above in enumerate(parents):
            law = problems.draft[depths[above]][problem, prefixes[above]]
            if not problems.has_replacement:
                siblings = [j for j in range(i) if parents[j] == above]
                law = _left(law, tokens[:, siblings])
            laws.append(law)
            chosen = law.gather(1, tokens[:, i : i + 1])[:, 0].double()
            weight *= torch.where(is_beyond[:, i], 1.0, chosen)
            prefixes.append(prefixes[above] * vocab + tokens[:, i])
        prefix = torch.stack(prefixes, dim=1)
        keep = ~(is_beyond & (tokens > 0)).any(dim=1)  # one draft for all that is not drafted
        keep &= (weight > 0) | with_impossible
        self.problem, self.prefix, self.weight = problem[keep], prefix[keep], weight[keep]
        self.tokens = tokens.masked_fill(is_beyond, PAD_TOKEN)[keep]
        self.valid = valid[keep] if problems.num_valid else None
        self.logits, self.laws = self.of_rows(problems.logits), None
        if width and not problems.is_point_mass:
            self.laws = torch.stack(laws, 1).masked_fill(is_beyond[..., None], torch.nan)[keep]

    def __len__(self) -> int:
        return len(self.problem)

    def of_rows(self, levels: list[Tensor]) -> Tensor:
        """`[R, N, V]`: a table's entries after each row of every window."""
        rows = [levels[d][self.problem, self.prefix[:, i]] for i, d in enumerate(self.depths)]
        return torch.stack(rows, dim=1)

    def describe(self, row: int) -> str:
        """One of the rows, in a few words."""
        drafted = tuple(token for token in self.tokens[row].tolist() if token >= 0)
        return f"draft {drafted} of {self.problems.describe(int(self.problem[row]))}"

    def inputs(self, rows: Tensor) -> tuple[Draft, Tensor, LogitsFilter]:
        """Draft, target logits and filter of a batch of these rows."""

        def take(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows].to(self.device)

        of_row = self.problem[rows].tolist()
        logits_filter = {
            name: [v[w] for w in of_row] for name, v in self.problems.logits_filter.items()
        }
        tree = {}
        if not self.problems.is_chain:
            parents = torch.tensor(self.problems.parents, device=self.device)
            tree = {"parents": parents.expand(len(rows), -1), "depth": max(self.depths)}
        given = take(self.tokens), take(self.laws), take(self.valid)
        if self.laws is None or self.problems.num_paths is None:
            draft = Draft(*given, **tree)
        else:
            draft = PathDraft(*given, **tree, num_paths=self.problems.num_paths)
        return (
            draft,
            take(self.logits),
            LogitsFilter(len(rows), device=self.device, **logits_filter),
        )

    def runner(self, decide: Decide, rows: Tensor) -> Callable[[Tensor | None, Tensor], Verdict]:
        """A sampler over a batch of these rows, repeated at will: a function from accepting
        uniforms and the draws of tokens to a verdict on the CPU.

        The uniforms are `[n, K]`, or `None`. The draws are uniforms `[n]` or exponentials `[n, V]`
        for the extra token, or exponentials `[n, N, V]`, a race after each row of the window, or
        `[n, P, N, V]`, several races there. All draws that a rule has no business with are NaN. A
        third argument makes the noise of uniforms and exponentials.
        """
        draft, logits, logits_filter = self.inputs(rows)
        shape = len(rows), len(Stream), logits.shape[1]

        def run(accept: Tensor | None, draws: Tensor, source: Callable = ScriptedNoise) -> Verdict:
            uniforms, races = torch.full(shape, torch.nan, dtype=torch.float64, device="cpu"), None
            if accept is not None:
                uniforms[:, Stream.ACCEPT, :-1] = accept
            if draws.dim() == 1:
                uniforms[:, Stream.RESAMPLE, 0] = draws
            else:
                races = (draws if draws.dim() > 2 else draws[:, None]).to(self.device)
            noise = source(uniforms.to(self.device), races)
            verdict = check_verdict(decide, decide(draft, logits, logits_filter, noise), draft)
            check_decisions(decide, verdict, draft, logits)
            return map_tensors(Tensor.cpu, verdict)

        return run


def _left(law: Tensor, chosen: Tensor) -> Tensor:
    """What tokens `[R, n]` leave of distributions `[R, V]`: see `Problems.has_replacement`."""
    if not chosen.shape[1]:
        return law
    is_chosen = torch.zeros_like(law, dtype=torch.bool).scatter(1, chosen, True)
    left = law.masked_fill(is_chosen, 0.0)
    mass = left.sum(dim=1, keepdim=True)
    lowest = (~is_chosen).long().argmax(dim=1, keepdim=True)
    return torch.where(mass > 0, left / mass, torch.zeros_like(law).scatter(1, lowest, 1.0))
