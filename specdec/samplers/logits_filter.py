"""`LogitsFilter`: the one place where logits become probabilities, after which none flow on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.arguments import (
    check_device,
    check_integer,
    check_number,
    check_tensor,
    plain_numbers,
)
from specdec.kernels import FilterParams, filtered_probs, sample
from specdec.kernels.sample.reference import sample_tokens
from specdec.kernels.truncate.reference import filter_params, filtered_logits
from specdec.kernels.types import Truncation

Values = float | int | None | Sequence

LEAST_TEMPERATURE = 1e-30
"""Above 0. Logits of up to 1e8 over a smaller one would not be numbers of float32."""


@dataclass(init=False, eq=False, repr=False)
class LogitsFilter:
    """The sampling parameters of a batch (HF's logits warpers, vLLM's `SamplingParams`):
    temperature, top-k, top-p and min-p, one value per row, in the order of HF's warpers.

    Temperature 0 is the limit: a one-hot distribution on the largest logit, the lowest id among
    equals. A batch may mix greedy and sampled rows.

    Args:
        batch_size: rows B.
        temperature: >= `LEAST_TEMPERATURE`, or 0 for greedy.
        top_k: keep the k largest logits, ties at the k-th included; `None` or 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p; `None` or 1
            keeps all.
        min_p: keep tokens with at least `min_p` times the largest probability; `None` or 0 keeps
            all.
        device: where the values live.

    Each is a scalar or a sequence of one value per row.

    Raises:
        ValueError: a value out of range, or a sequence whose length is not `batch_size`.

    Example:
        >>> logits_filter = LogitsFilter(2, temperature=[0.0, 1.0])
        >>> logits_filter(torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
        tensor([[1.0000, 0.0000, 0.0000],
                [0.3333, 0.3333, 0.3333]])

    Reference: top-p is Holtzman et al. (arXiv:1904.09751), min-p Nguyen et al. (arXiv:2407.01082).
    """

    is_greedy: bool
    """Every row was greedy when the filter was built. A number on the host, so that operations
    which no row needs are not run.
    """
    _rows: Tensor  # [B, 0], which says how many rows there are where no other value is in use
    _temperature: Tensor | None  # of rows that are not greedy
    _greedy: Tensor | None
    _truncation: Truncation

    def __init__(
        self,
        batch_size: int,
        *,
        temperature: Values = 1.0,
        top_k: Values = None,
        top_p: Values = None,
        min_p: Values = None,
        device: torch.device | str = "cpu",
    ):
        check_integer("batch_size", batch_size, 0)
        device = check_device("device", device)
        temperatures = _per_row("temperature", temperature, batch_size)
        top_ks = _per_row("top_k", top_k, batch_size)
        top_ps = _per_row("top_p", top_p, batch_size)
        min_ps = _per_row("min_p", min_p, batch_size)
        self.is_greedy = temperatures.count(0) == batch_size
        self._rows = torch.empty(batch_size, 0, device=device)

        def column(values: list, dtype: torch.dtype, is_used: bool) -> Tensor | None:
            return torch.tensor(values, dtype=dtype, device=device) if is_used else None

        positive = [t or 1.0 for t in temperatures]
        self._temperature = column(positive, torch.float64, any(t != 1 for t in positive))
        self._greedy = column([t == 0 for t in temperatures], torch.bool, 0 in temperatures)
        self._truncation = Truncation(
            top_k=column(top_ks, torch.long, any(top_ks)),
            top_p=column(top_ps, torch.float64, any(p < 1 for p in top_ps)),
            min_p=column(min_ps, torch.float64, any(min_ps)),
            max_top_k=max(top_ks, default=0),
            lacks_top_k=int(0 in top_ks),
        )
        self.__post_init__()

    def __post_init__(self):
        self.batch_size = len(self._rows)
        self._truncates = any(value is not None for value in self._truncation[:3])

    def __call__(self, logits: Tensor) -> Tensor:
        """The probabilities of each row.

        Args:
            logits: `[B, V]` or `[B, N, V]`; half precision is widened to float32 first.

        Returns:
            Probabilities of the same shape, float32 (float64 for float64 logits).
        """
        self._check_logits(logits)
        return filtered_probs(logits, self.params(logits))

    def _check_logits(self, logits: Tensor) -> None:
        """Raises an error unless these are logits of the filter's rows."""
        rows, fits = self.batch_size, isinstance(logits, Tensor) and logits.is_floating_point()
        fits = fits and logits.dim() in (2, 3) and bool(logits.shape[-1])
        # The definition reads one row's values for all rows; a kernel has no such rule.
        if not (fits and (rows == len(logits) or (rows == 1 and not logits.is_cuda))):
            from specdec.samplers.refusals import refuse_logits

            refuse_logits(logits, rows)

    def scores(self, logits: Tensor) -> Tensor:
        """Logits over the temperature, -inf where truncation leaves nothing: what HF calls scores.
        Rows at temperature 0 have their logits.

        Args:
            logits: `[B, V]` or `[B, N, V]`.

        Returns:
            A tensor of its own, of the same shape, float32 (float64 for float64 logits).
        """
        self._check_logits(logits)
        scores = filtered_logits(logits, self.params(logits))
        if self._truncates and self._greedy is not None:
            is_greedy = self._greedy.view(-1, *[1] * (logits.dim() - 1))
            scores = torch.where(is_greedy, logits.to(scores.dtype), scores)
        return scores.clone() if scores is logits else scores

    @property
    def signature(self) -> tuple:
        """Which values are in use: all that decides which operations the filter runs."""
        columns = self._temperature, self._greedy, *self._truncation[:3]
        return self.is_greedy, *(c is not None for c in columns), *self._truncation[3:]

    @property
    def greedy_rows(self) -> Tensor | None:
        """`[B]` bool, the rows at temperature 0; `None` when none was when the filter was built."""
        return self._greedy

    def params(self, logits: Tensor) -> FilterParams:
        """How these logits `[B, V]` or `[B, N, V]` become probabilities."""
        if self._truncates and not self.is_greedy:
            return filter_params(logits, self._temperature, self._greedy, self._truncation)
        return FilterParams(self._temperature, self._greedy)

    def draw(
        self, logits: Tensor, uniforms: Tensor | None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens and the probabilities that they were drawn from.

        Args:
            logits: `[B, V]` or `[B, N, V]`.
            uniforms: `[B]` or `[B, N]` float64 in [0, 1); may be `None` where every row is greedy.
            out: filled with the probabilities; see `kernels.sample`.

        Returns:
            Tokens `[B]` or `[B, N]`, and probabilities of the shape of `logits`; `None` where every
            row is greedy, since a one-hot distribution is a point mass on the token.
        """
        self._check_logits(logits)
        if self.is_greedy:
            return logits.argmax(dim=-1), None
        check_tensor("uniforms", uniforms, logits.shape[:-1])
        return sample(logits, self.params(logits), uniforms, out)

    def choose(self, logits: Tensor, uniforms: Tensor | None) -> Tensor:
        """The tokens of `draw`, without their probabilities."""
        if self.is_greedy:
            return logits.argmax(dim=-1)
        return sample_tokens(logits, self.params(logits), uniforms)

    def at_temperature(self, temperature: float) -> LogitsFilter:
        """The same filter with another temperature in every row that is not greedy.

        Args:
            temperature: >= `LEAST_TEMPERATURE`.
        """
        temperature = check_number("temperature", temperature, LEAST_TEMPERATURE)
        other = copy.copy(self)
        other._temperature = None
        if temperature != 1:
            other._temperature = torch.full(
                (self.batch_size,), temperature, dtype=torch.float64, device=self._rows.device
            )
        return other


def logprobs_of(tokens: Tensor, logits: Tensor) -> Tensor:
    """`[B, N]` float32: log-probabilities of tokens `[B, N]` by the softmax of logits or scores
    `[B, N, V]`, which is computed in at least float32.

    Example:
        >>> two_likeliest = LogitsFilter(1, temperature=0.5, top_k=2)
        >>> scores = two_likeliest.scores(torch.tensor([[[0.0, 1.0, 2.0]]]))
        >>> logprobs_of(torch.tensor([[1]]), scores)
        tensor([[-2.1269]])
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    of_all = logits.log_softmax(dim=-1, dtype=dtype)
    return of_all.gather(-1, tokens[..., None])[..., 0].float()


_RANGES: dict[str, tuple[float, str, Callable[[float], bool]]] = {
    "temperature": (
        1.0,
        f"0, which is greedy, or a number >= {LEAST_TEMPERATURE:g}",
        lambda value: value == 0 or LEAST_TEMPERATURE <= value < math.inf,
    ),
    "top_k": (0, "an integer >= 0 (0 keeps all)", lambda v: 0 <= v < 2**63 and int(v) == v),
    "top_p": (1.0, "a number in 0..1", lambda value: 0 <= value <= 1),
    "min_p": (0.0, "a number in 0..1", lambda value: 0 <= value <= 1),
}
"""What `None` stands for, which values are allowed, in words, and by a test."""


def _per_row(name: str, given: Values, rows: int) -> list:
    default, expected, is_valid = _RANGES[name]
    given = plain_numbers(given)
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    values = list(given) if is_list else [given] * rows
    if len(values) != rows:
        from specdec.samplers.refusals import refuse_count

        refuse_count(name, len(values), rows)
    values = [default if value is None else value for value in values]
    # Of a few distinct ones in the thousands of rows of a certificate.
    if not (set(map(type, values)) <= {int, float} and all(map(is_valid, set(values)))):
        from specdec.samplers.refusals import check_values

        check_values(name, values, expected, is_valid)
    return values
