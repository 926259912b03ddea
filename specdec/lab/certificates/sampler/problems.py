"""Toy problems of decoding, so small that their distributions are known exactly.

Legend: W problems (independent contexts, together in one batch), V vocabulary, K draft tokens
(nodes of a tree), D depth (K for a chain). A table of level i is `[W, V**i, V]`: one distribution,
or row of logits, behind each prefix of i tokens (prefixes are numbered in base V). So every
distribution depends on the context.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from specdec.tree_shape import depths_of

DraftKind = Literal["soft", "point-mass", "short point-mass", "mixed"]

FILTERS = (
    {},
    {"top_k": 2},
    {"top_p": 0.77},
    {"min_p": 0.6},
    {"temperature": 0.0},
    {"temperature": 0.5, "top_k": 3, "top_p": 0.93, "min_p": 0.07},
    {"temperature": 2.0},
    {"temperature": 0.5, "top_p": 0.77},
    {"temperature": 2.0, "min_p": 0.6},
    {"temperature": 0.5, "top_k": 2},
    {"top_k": 3, "top_p": 0.77},
    {"top_k": 3, "min_p": 0.6},
    {"top_p": 0.77, "min_p": 0.6},
)
"""Values of `LogitsFilter` that are tried together in one batch, a problem each: alone, in pairs,
and all. None of the fractions is a sum or ratio of the tables' probabilities, so rounding decides
nothing.
"""

SHIFTS = {
    torch.float64: 800.0,
    torch.float32: 100.0,
    torch.bfloat16: 100.0,
    torch.float16: 30.0,
}
"""Added to a row of logits, which leaves its probabilities as they are. Without subtracting the
maximum first, `exp` of such a logit is infinite in that type, and of its negative value 0."""

BATCHES: tuple[tuple[DraftKind, Sequence[dict]], ...] = (
    ("soft", ({},)),
    ("soft", FILTERS),
    ("point-mass", FILTERS),
    ("short point-mass", ({},)),
    ("mixed", FILTERS),
    ("mixed", ({"temperature": 0.0},)),
)
"""Kinds of drafts, and filters that one batch mixes: without a filter, with all, and all greedy.
Every pair of (filtered or not), (K tokens or fewer), (probabilities or none) is among them.
"""
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass
class Problems:
    """What a sampler sees, and the distribution that it has to reproduce."""

    logits: list[Tensor]  # of the target, levels 0..D
    draft: list[Tensor]  # distributions, levels 0..D - 1
    target: list[Tensor] | None = None  # after the filter, 0..D; the softmax of the logits
    num_valid: list[int] | None = None  # tokens that each problem drafts, K by default
    is_point_mass: bool = False  # the sampler gets no draft probabilities
    parents: Sequence[int] | None = None  # of a tree, see `Draft.parents`
    has_replacement: bool = False
    """Siblings are drawn independently. Else each is drawn from what the tokens of its
    earlier siblings leave of the draft distribution, renormalised, and where that is nothing it is
    the lowest id that is left, a point mass."""
    logits_filter: dict[str, list] = field(
        default_factory=dict
    )  # arguments of `LogitsFilter`, a value per problem
    name: str = "problems"

    def __post_init__(self):
        if self.target is None:
            self.target = [level.softmax(dim=-1) for level in self.logits]

    def __len__(self) -> int:
        return len(self.logits[0])

    @property
    def num_draft_tokens(self) -> int:
        """K."""
        return len(self.window_parents)

    @property
    def is_chain(self) -> bool:
        """Rules get no tree."""
        return self.parents is None

    @property
    def window_parents(self) -> tuple[int, ...]:
        """The row of the window that each token follows, see `Draft.window_parents`."""
        if self.parents is None:
            return tuple(range(len(self.draft)))
        return tuple(parent + 1 for parent in self.parents)

    @property
    def num_paths(self) -> int | None:
        """P of a tree of independent paths, see `PathDraft`."""
        if self.is_chain or not self.has_replacement:
            return None
        count = self.parents.count(-1)
        paths = tuple(max(node - count, -1) for node in range(len(self.parents)))
        return count if self.parents == paths else None

    @property
    def family(self) -> str:
        """What is drafted, in a word or two."""
        if self.is_chain:
            return "chains"
        return "trees" if self.num_paths is None else "independent paths"

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.logits[0].shape[-1]

    @property
    def least(self) -> float:
        """The smallest probability above 0 that the target gives a token after nothing."""
        return float(self.target[0][self.target[0] > 0].min())

    def options(self, problem: int) -> dict[str, float]:
        """Arguments of `LogitsFilter` that one of the problems uses."""
        given = {name: values[problem] for name, values in self.logits_filter.items()}
        return {name: value for name, value in given.items() if value != NEUTRAL[name]}

    def shifted(self, dtype: torch.dtype) -> "Problems":
        """The problems with logits of a type, a constant of `SHIFTS` added to most rows, and the
        target distribution of the rounded logits; draft probabilities are float64 beside float64
        logits, else float32.
        """
        logits, target = [], []
        for level in self.logits:
            count, prefixes, _ = level.shape
            number = torch.arange(count + prefixes - 1, device="cpu").unfold(0, prefixes, 1)
            rows = (level + (number % 5 - 2)[..., None] / 2 * SHIFTS[dtype]).to(dtype)
            exact = rows.double()
            weights = (exact - exact.amax(dim=-1, keepdim=True)).exp()
            laws = [filtered_law(x, self.options(w)) for w, x in enumerate(weights)]
            logits.append(rows)
            target.append(torch.stack(laws))
        of_draft = dtype if dtype == torch.float64 else torch.float32
        draft = [level.to(of_draft) for level in self.draft]
        return replace(self, logits=logits, target=target, draft=draft)

    def describe(self, problem: int) -> str:
        """One of the problems, in a few words."""
        logits_filter = "".join(f", {n}={v:g}" for n, v in self.options(problem).items())
        valid = f", {self.num_valid[problem]} drafted" if self.num_valid else ""
        sizes = f"K = {self.num_draft_tokens}, V = {self.vocab_size}"
        sizes += "" if self.is_chain else f", parents {self.parents}"
        return f"{self.name} ({sizes}{valid}{logits_filter}), problem {problem}"

    def text_of(self, code: int, length: int) -> tuple[int, ...]:
        """The text of a number in base V."""
        return tuple(code // self.vocab_size**i % self.vocab_size for i in range(length))[::-1]

    def table(self, problem: int, text: tuple[int, ...], accept: Tensor | None) -> tuple[str, ...]:
        """Lines with the distributions `[V]` of one problem along a text, and with the chances
        `[V]` to accept its first draft token.
        """
        rows, code = {"token": range(self.vocab_size)}, 0
        drafted = self.num_valid[problem] if self.num_valid else len(self.draft)
        for i, token in enumerate(text):
            after = f" after {text[:i]}" if i else ""
            rows[f"target{after}"] = self.target[i][problem, code].tolist()
            if i < min(len(self.draft), drafted):
                rows[f"draft{after}"] = self.draft[i][problem, code].tolist()
            if i == 0 and accept is not None:
                rows["accepted if drafted"] = ["-" if p != p else p for p in accept.tolist()]
            code = code * self.vocab_size + token
        width = max(map(len, rows))
        shown = {n: [f"{p:.4f}" if type(p) is float else p for p in row] for n, row in rows.items()}
        return tuple(f"{n:{width}}" + "".join(f"{p:>9}" for p in row) for n, row in shown.items())


def standard_problems(
    sizes: tuple[tuple[int, int, int], ...],
    trees: tuple[tuple[int, ...], ...] = (),
    paths: tuple[tuple[int, int], ...] = (),
    *,
    dtype: torch.dtype = torch.float64,
) -> Iterator[Problems]:
    """The problems that `certify` tries, always the same: the batches of `BATCHES` for each size,
    and for each tree over the vocabulary and with the problems of the last size. Tables are small
    integers, so zeros, ties, point masses, and equal and disjoint supports are common.

    Args:
        sizes: (V, K, W) of each batch.
        trees: parents of their nodes, see `Draft.parents`; siblings are drawn without replacement
            and, in every second tree, with it.
        paths: (P, D) of independent paths, over the vocabulary and with the problems of the last
            size, too.
        dtype: of logits and draft probabilities.
    """
    vocab, _, count = sizes[-1]
    shapes = [(*size, None) for size in sizes]
    shapes += [(vocab, max(depths_of(parents)), count, parents) for parents in trees]
    shapes += [(vocab, d, count, tuple(max(n - p, -1) for n in range(p * d))) for p, d in paths]
    for number, (vocab, width, count, parents) in enumerate(shapes):
        generator = torch.Generator().manual_seed(number)
        for kind, filters in BATCHES:
            options = {"kind": kind, "filters": filters, "parents": parents}
            problems = random_problems(vocab, width, count, generator, **options)
            is_drawn = number % 2 == 1 or number >= len(shapes) - len(paths)
            problems.has_replacement = is_drawn and not problems.is_point_mass
            yield problems.shifted(dtype)


def rare_problems(vocab: int, width: int, count: int) -> Problems:
    """Soft drafts of `width` tokens or one, in which target and draft give tokens as little as
    2**-36 of what they give others: a rule that drops or rounds rare tokens is seen.
    """
    generator, tables = torch.Generator().manual_seed(1000), []
    for levels in (min(width, 1) + 1, min(width, 1)):
        shapes = [(count, vocab**i, vocab) for i in range(levels)]
        tables.append([_rare_weights(shape, generator) for shape in shapes])
    target, draft = ([x / x.sum(dim=-1, keepdim=True) for x in levels] for levels in tables)
    return Problems(
        logits=[level.log() for level in target],
        draft=draft,
        target=target,
        name="soft drafts of rare tokens",
    )


def _rare_weights(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    steps = torch.randint(0, 13, shape, generator=generator, device="cpu")
    return random_weights(shape, generator) * torch.exp2(-3 * steps.double())  # exact


def random_problems(
    vocab: int,
    width: int,
    count: int,
    generator: torch.Generator,
    *,
    kind: DraftKind = "soft",
    filters: Sequence[dict] = ({},),
    parents: tuple[int, ...] | None = None,
) -> Problems:
    """Draws W = `count` problems with integer-weight tables for K = `width` draft tokens, or for a
    tree of that depth.

    `"soft"` drafts carry the probabilities of each token; `"point-mass"` drafts are deterministic,
    `"short point-mass"` ones may have fewer than K tokens, as those of n-gram drafters; `"mixed"`
    has point masses and soft drafts, and may be short. Arguments of `LogitsFilter` are used by
    turns.
    """
    weights = [random_weights((count, vocab**i, vocab), generator) for i in range(width + 1)]
    draft = [random_draft_weights(level, generator) for level in weights[:width]]
    if kind == "mixed":
        host = {"dtype": torch.float32, "device": "cpu"}
        is_sharp = [
            torch.rand((*d.shape[:-1], 1), generator=generator, **host) < 0.5 for d in draft
        ]
        draft = [torch.where(s, _one_hot(d), d) for s, d in zip(is_sharp, draft, strict=True)]
    is_point_mass = kind in ("point-mass", "short point-mass")
    if is_point_mass:
        draft = [_one_hot(level) for level in draft]
    num_valid = None
    if kind in ("mixed", "short point-mass"):
        most = width if parents is None else len(parents)
        num_valid = torch.randint(0, most + 1, (count,), generator=generator, device="cpu").tolist()
    filters = [filters[problem % len(filters)] for problem in range(count)]
    names = {name for options in filters for name in options}
    return Problems(
        logits=[level.log() for level in weights],
        draft=[level / level.sum(dim=-1, keepdim=True) for level in draft],
        target=[torch.stack([*map(filtered_law, level, filters)]) for level in weights],
        num_valid=num_valid,
        is_point_mass=is_point_mass,
        parents=parents,
        logits_filter={
            n: [options.get(n, NEUTRAL[n]) for options in filters] for n in NEUTRAL if n in names
        },
        name=f"{kind} drafts",
    )


def random_weights(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Integer weights 0..4, one positive in each row; zeros, ties and one-hot rows are common."""
    weights = torch.randint(0, 5, shape, generator=generator, device="cpu")
    spare = torch.randint(0, shape[-1], (*shape[:-1], 1), generator=generator, device="cpu")
    is_empty = (weights.sum(-1, keepdim=True) == 0).long()
    return weights.scatter_add(-1, spare, is_empty).double()


def random_draft_weights(target: Tensor, generator: torch.Generator) -> Tensor:
    """Draft weights beside target weights; rows are by turns free, equal, disjoint, or one-hot."""
    free = random_weights(target.shape, generator)
    disjoint = (target == 0).double()
    disjoint = torch.where(disjoint.sum(-1, keepdim=True) > 0, disjoint, free)
    kind = torch.randint(0, 5, (*target.shape[:-1], 1), generator=generator, device="cpu")
    for number, rows in enumerate((target, disjoint, _one_hot(free))):
        free = torch.where(kind == number, rows, free)
    return free


def filtered_law(weights: Tensor, options: dict) -> Tensor:
    """What temperature, top-k, top-p and min-p, in this order, leave of integer weights `[..., V]`
    in float64: the definition, word for word, by sorting. All but top-p's share is exact at
    temperatures 1 / n.

    Args:
        weights: >= 0, not all zero.
        options: arguments of `LogitsFilter`.

    Example:
        >>> filtered_law(torch.tensor([1.0, 3.0, 4.0, 1.0]), {"top_k": 2})
        tensor([0.0000, 0.4286, 0.5714, 0.0000])
    """
    options = NEUTRAL | options
    if options["temperature"] == 0:
        return _one_hot(weights)
    weights = weights ** (1 / options["temperature"])
    if options["top_k"]:
        kth = weights.topk(min(options["top_k"], weights.shape[-1])).values[..., -1:]
        weights = weights * (weights >= kth)
    rising, tokens = weights.sort(dim=-1, stable=True)
    is_dropped = rising.cumsum(dim=-1) <= (1 - options["top_p"]) * rising.sum(dim=-1, keepdim=True)
    is_dropped[..., -1] = False  # the most likely token always stays
    weights = weights.masked_fill(is_dropped.scatter(-1, tokens, is_dropped), 0)
    weights = weights * (weights >= options["min_p"] * weights.amax(dim=-1, keepdim=True))
    return weights / weights.sum(dim=-1, keepdim=True)


def _one_hot(weights: Tensor) -> Tensor:
    return torch.zeros_like(weights).scatter(-1, weights.argmax(-1, keepdim=True), 1.0)
