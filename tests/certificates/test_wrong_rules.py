"""`certify(rule)` finds each planted fault of a table; the page names what it does not see."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from specdec import RejectionSampler, Sampler, certify
from specdec.kernels import draw
from specdec.samplers import LogitsFilter, ScriptedNoise, Stream
from specdec.types import PAD_TOKEN, Verdict

Change = Callable[..., tuple]
"""(draft, logits, logits_filter, noise) to what the sound rule is given instead."""


@dataclass(frozen=True)
class Wrong:
    """A fault.

    Args:
        change: see `Change`.
        word: of the failure that `certify` prints; `None` where it sees nothing.
        reason: why it sees nothing, as `docs/certificates.md` says.
    """

    change: Change | type[Sampler]
    word: str | None
    reason: str = ""

    def rule(self) -> Sampler:
        if isinstance(self.change, type):
            return self.change()
        return Changed(self.change)


class Changed(RejectionSampler):
    """The sound rule, on changed inputs."""

    def __init__(self, change: Change):
        super().__init__()
        self.change = change

    def accept(self, draft, target_logits, logits_filter, noise):
        return super().accept(*self.change(draft, target_logits, logits_filter, noise))


class NothingAtZero(RejectionSampler):
    """Accepts no token in a batch where some row samples: the steps of a greedy row depend on its
    neighbours.
    """

    def forward(self, draft, target_logits, logits_filter, noise):
        if logits_filter.is_greedy:
            return self.accept_greedily(draft, target_logits)
        first = logits_filter(target_logits)[:, 0]
        token = draw(first, noise.uniform(Stream.RESAMPLE)[:, 0])
        tokens = torch.full(target_logits.shape[:2], PAD_TOKEN)
        tokens[:, 0] = token
        return Verdict(tokens, torch.zeros_like(token), draft.num_valid)


def sharper(logits: torch.Tensor) -> torch.Tensor:
    """Logits of another law, of the same ids, without overflow."""
    return 1.3 * (logits - logits.amax(dim=-1, keepdim=True))


def where(is_wrong: Callable) -> Change:
    """Sharper logits where (draft, logits, logits_filter) say so."""

    def change(draft, logits, logits_filter, noise):
        if is_wrong(draft, logits, logits_filter):
            logits = sharper(logits)
        return draft, logits, logits_filter, noise

    return change


def of_logits(edit: Callable) -> Change:
    """Other logits in every call."""

    def change(draft, logits, logits_filter, noise):
        return draft, edit(logits), logits_filter, noise

    return change


def rows_where(is_wrong: Callable) -> Change:
    """Sharper logits in rows `[B]` of which (draft, logits, logits_filter) say so."""

    def change(draft, logits, logits_filter, noise):
        rows = is_wrong(draft, logits, logits_filter)[:, None, None]
        return draft, torch.where(rows, sharper(logits), logits), logits_filter, noise

    return change


def in_use(logits_filter: LogitsFilter) -> set[str]:
    """Names of the options that some row uses."""
    rows = logits_filter._truncation
    names = {name for name in ("top_k", "top_p", "min_p") if getattr(rows, name) is not None}
    return names | ({"temperature"} if logits_filter._temperature is not None else set())


def forgets(name: str, *, alone: bool) -> Change:
    """Does not filter by one option; or only where the batch uses no other one."""

    def change(draft, logits, logits_filter, noise):
        names = in_use(logits_filter)
        if name in names and (not alone or names == {name}):
            options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
            kept = {
                n: getattr(logits_filter._truncation, n, None)
                for n in names - {name, "temperature"}
            }
            if "temperature" in names - {name}:
                kept["temperature"] = logits_filter._temperature
            kept = {n: options[n] if v is None else v.tolist() for n, v in kept.items()}
            greedy = logits_filter.greedy_rows
            if greedy is not None:
                given = kept.get("temperature", [1.0] * len(logits))
                kept["temperature"] = [0.0 if g else t for g, t in zip(greedy, given, strict=True)]
            logits_filter = LogitsFilter(len(logits), **kept)
        return draft, logits, logits_filter, noise

    return change


def one_temperature(draft, logits, logits_filter, noise):
    """The first row's, for all."""
    own = logits_filter._temperature
    if own is not None:
        shape = -1, 1, 1
        logits = logits * (own.view(shape) / own[0]).to(logits.dtype)
    return draft, logits, logits_filter, noise


def softmax_without_maximum(logits):
    weights = logits.exp()
    return (weights / weights.sum(dim=-1, keepdim=True)).log()


def softmax_in_bfloat16(logits):
    """Off by as much as 2**-9; probabilities of a rule that widens are not."""
    return logits.softmax(dim=-1).log() if logits.dtype == torch.bfloat16 else logits


def small_ids(most: int) -> Change:
    """Ids that do not fit are others."""

    def change(draft, logits, logits_filter, noise):
        logits = logits.clone()
        logits[..., most:] = -torch.inf
        return draft, logits, logits_filter, noise

    return change


def writes_logits(draft, logits, logits_filter, noise):
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    return draft, logits, logits_filter, noise


def writes_probs(draft, logits, logits_filter, noise):
    if draft.probs is not None:
        draft.probs.mul_(1.0)
        draft.probs[..., 0].clamp_(min=1e-9)
    return draft, logits, logits_filter, noise


def noise_of(change: Callable) -> Change:
    """Other uniforms."""

    def changed(draft, logits, logits_filter, noise):
        shape = len(logits), len(Stream), logits.shape[1]
        uniforms = torch.zeros(shape, dtype=torch.float64)
        for stream in (Stream.ACCEPT, Stream.RESAMPLE):
            uniforms[:, stream] = noise.uniform(stream)[:, : shape[2]]
        return draft, logits, logits_filter, ScriptedNoise(change(uniforms))

    return changed


def of_the_first_call(uniforms, kept={}):  # noqa: B006  the fault
    return kept.setdefault(uniforms.shape, uniforms.clone())


def shared(uniforms):
    """The extra token by the first accepting uniform."""
    uniforms = uniforms.clone()
    uniforms[:, Stream.RESAMPLE, 0] = uniforms[:, Stream.ACCEPT, 0]
    return uniforms


def from_the_last_row(draft, logits, logits_filter, noise):
    """Draws what follows the drafted tokens from the last row, in short drafts too."""
    if draft.num_valid is not None:
        logits, rows = logits.clone(), torch.arange(len(logits))
        logits[rows, draft.num_valid] = logits[:, -1].clone()
    return draft, logits, logits_filter, noise


def flat_draft(draft, logits, logits_filter, noise):
    """Takes the draft's probabilities to be uniform."""
    if draft.probs is not None:
        probs = torch.full_like(draft.probs, 1 / draft.probs.shape[-1])
        draft = replace(draft, probs=probs)
    return draft, logits, logits_filter, noise


def is_point_mass(draft, logits, _):
    return draft.probs is None and draft.tokens.shape[1] > 0


def rows(*numbers: int) -> Callable:
    """Whether a row has one of these numbers, counted from the end where negative."""

    def of(draft, logits, _):
        count = len(logits)
        chosen = torch.zeros(count, dtype=torch.bool)
        chosen[[n for n in numbers if -count <= n < count]] = True
        return chosen

    return of


def rises(logits):
    """The first of equal maxima wins."""
    return logits + torch.arange(logits.shape[-1], dtype=logits.dtype) * -1e-6


WRONG = {
    # logits
    "logits are clamped at 5": Wrong(of_logits(lambda x: x.clamp(max=5)), "law"),
    "logits are clamped at -50": Wrong(of_logits(lambda x: x.clamp(min=-50)), "law"),
    "exp without subtracting the maximum": Wrong(of_logits(softmax_without_maximum), "law"),
    "a softmax in float32 beside float64": Wrong(of_logits(lambda x: x.float().double()), "law"),
    "a softmax in bfloat16": Wrong(of_logits(softmax_in_bfloat16), "law"),
    "wrong in float16": Wrong(where(lambda d, x, f: x.dtype == torch.float16), "law"),
    "ties are broken by the id": Wrong(of_logits(rises), "law"),
    # filters
    "top-k is forgotten": Wrong(forgets("top_k", alone=False), "zero"),
    "top-k alone is forgotten": Wrong(forgets("top_k", alone=True), "rows"),
    "top-p alone is forgotten": Wrong(forgets("top_p", alone=True), "rows"),
    "min-p alone is forgotten": Wrong(forgets("min_p", alone=True), "rows"),
    "the temperature alone is forgotten": Wrong(forgets("temperature", alone=True), "rows"),
    "one temperature for all rows": Wrong(one_temperature, "law"),
    "a greedy row depends on its neighbours": Wrong(NothingAtZero, "rows"),
    # vocabularies
    "wrong in 1 000 to 30 000 ids": Wrong(
        where(lambda d, x, f: 1000 <= x.shape[-1] <= 30_000), "ids"
    ),
    "wrong in 400 to 4 000 ids": Wrong(where(lambda d, x, f: 400 < x.shape[-1] < 4000), "ids"),
    "ids of 16 bits": Wrong(small_ids(2**16), "zero"),
    "probabilities below 1e-8 are dropped": Wrong(
        of_logits(lambda x: x.masked_fill(x.softmax(dim=-1) < 1e-8, -torch.inf)), "law"
    ),
    "the 100 likeliest ids alone": Wrong(
        of_logits(
            lambda x: (
                x.masked_fill(x < x.topk(min(100, x.shape[-1])).values[..., -1:], -torch.inf)
                if x.shape[-1] > 100 and (x > -torch.inf).sum(-1).max() > 100
                else x
            )
        ),
        "law",
    ),
    "id 50256 is treated otherwise": Wrong(
        of_logits(lambda x: torch.where(torch.arange(x.shape[-1]) == 50_256, x - 1, x)),
        "ids",
    ),
    # rows and batches
    "wrong in the first row": Wrong(rows_where(rows(0)), "rows"),
    "wrong in the last row": Wrong(rows_where(rows(-1)), "rows"),
    "wrong by what the next row has": Wrong(
        of_logits(lambda x: x + 0.3 * x.softmax(dim=-1).roll(1, 0)), "rows"
    ),
    "wrong in the rows 40 to 49": Wrong(rows_where(rows(*range(40, 50))), "rows"),
    "wrong in a row alone": Wrong(where(lambda d, x, f: len(x) == 1), "rows"),
    "wrong in batches of 23": Wrong(where(lambda d, x, f: len(x) == 23), "rows"),
    "wrong in batches of up to 64": Wrong(where(lambda d, x, f: 11 <= len(x) <= 64), "rows"),
    "wrong in 40 to 49 rows with one draft token": Wrong(
        where(lambda d, x, f: len(x) >= 40 and len(x) < 50 and x.shape[1] == 2), "rows"
    ),
    "wrong in small batches of point masses": Wrong(
        where(lambda d, x, f: is_point_mass(d, x, f) and len(x) < 40), "rows"
    ),
    # drafts
    "wrong with no draft token": Wrong(where(lambda d, x, f: x.shape[1] == 1), "law"),
    "wrong with six draft tokens": Wrong(where(lambda d, x, f: x.shape[1] == 7), "law"),
    "wrong for point masses": Wrong(where(is_point_mass), "law"),
    "draft probabilities are not read": Wrong(flat_draft, "law"),
    "a short draft reads the last row": Wrong(from_the_last_row, "law"),
    # numbers
    "the numbers of the first call": Wrong(noise_of(of_the_first_call), "rows"),
    "one uniform for two decisions": Wrong(noise_of(shared), "draws"),
    "uniforms of float32": Wrong(noise_of(lambda u: u.float().double()), "law"),
    "uniforms in reverse": Wrong(noise_of(lambda u: u.flip(-1)), "law"),
    # inputs
    "writes into the logits": Wrong(writes_logits, "state"),
    "writes into the draft probabilities": Wrong(writes_probs, "state"),
    # not seen
    "wrong with 20 draft tokens": Wrong(
        where(lambda d, x, f: x.shape[1] == 21), None, "more than six draft tokens are not tried"
    ),
    "wrong in one vocabulary, of 150 000 ids": Wrong(
        where(lambda d, x, f: x.shape[-1] == 150_000),
        None,
        "24 vocabularies of 37 to 262 144 ids are tried, and no others",
    ),
    "wrong in batches of 500 rows": Wrong(
        where(lambda d, x, f: len(x) == 500),
        None,
        "batches of 1 to 64 rows are tried, and some of more",
    ),
    "the 5 000 likeliest ids alone": Wrong(
        of_logits(
            lambda x: (
                x
                if x.shape[-1] <= 5000
                else x.masked_fill(x < x.topk(5000).values[..., -1:], -torch.inf)
            )
        ),
        None,
        "at most 701 ids are possible at once",
    ),
    "probabilities below 1e-13 are dropped": Wrong(
        of_logits(lambda x: x.masked_fill(x.softmax(dim=-1) < 1e-13, -torch.inf)),
        None,
        "distributions are compared to 1e-12",
    ),
    "wrong at top-k 50": Wrong(
        where(lambda d, x, f: f._truncation.max_top_k == 50),
        None,
        "each filter has one to three values",
    ),
    "wrong for bfloat16 in batches of 32": Wrong(
        where(lambda d, x, f: x.dtype == torch.bfloat16 and len(x) == 32),
        None,
        "other types of logits are tried in batches of one size each",
    ),
}
"""By what is wrong."""


PAGE = Path(__file__).parents[2] / "docs" / "certificates.md"
DEAR = [name for name in WRONG if WRONG[name].word is None]
"""A rule that passes takes all of the problems, one that fails some of them."""


SEEN = [name for name in WRONG if name not in DEAR]
CASES = [
    pytest.param(name, marks=() if number % 4 == 0 else pytest.mark.swept)
    for number, name in enumerate(SEEN)
]


@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_found(name):
    report = certify(WRONG[name].rule(), sizes=((3, 1, 13),), trees=())
    assert not report.passed, report
    assert WRONG[name].word in {failure.kind for failure in report.failures}, report
    assert re.search(rf"\n +{WRONG[name].word} \(\d+ found\): ", str(report))
    if WRONG[name].word == "rows":
        assert "a row is not decided on by what it has alone" in str(report)


@pytest.mark.swept
@pytest.mark.parametrize("name", DEAR)
def test_another_one_is_not(name):
    assert certify(WRONG[name].rule(), sizes=((3, 1, 13),), trees=()).passed


def test_the_page_names_what_is_not_seen():
    section = PAGE.read_text().split("## What certify(rule) does not see")[1].split("\n## ")[0]
    listed = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)[1:]
    listed = [row for row in listed if set(row[0]) != {"-"}]
    assert listed == [(name, WRONG[name].reason) for name in DEAR]
