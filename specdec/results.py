"""What a generation returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic

from torch import Tensor
from typing_extensions import TypeVar

if TYPE_CHECKING:
    from specdec.row_step import RowStep
    from specdec.statistics import SpeculationStats

_OUTPUTS = "scores", "logits", "logprobs", "raw_logprobs"
_PLAIN = (
    *("sequences", "lengths", "finish_reasons", "seeds", "stats", "steps", "origins", "prompts"),
    *("sampling", "row_inputs"),
)

TraceOrNone = TypeVar("TraceOrNone", default=Any)
"""A `Trace` where `generate` was told to keep one."""


@dataclass(frozen=True, eq=False)
class GenerationResult(Generic[TraceOrNone]):
    """The outcome of `SpeculativeGenerator.generate`.

    Args:
        sequences: `[B, T + M]` int64: the prompt exactly as passed, the new tokens, then padding;
            what HF `generate` returns.
        lengths: new tokens of each row.
        finish_reasons: per row `"eos"`, `"length"` or `"stop"` (a stopping criterion).
        seeds: per row the seed that was used, also when none was given; `None` for greedy
            generations.
        num_draft_tokens, depth, wall_s: as of `SpeculationStats`, for `stats`.
        trace: steps by row, with `generate(..., trace=True)`, which takes longer; else `None`. It
            is a `specdec.lab.trace.Trace`, which also holds the probabilities, draws, entropies and
            times of every step.
        steps: per row its steps (draft, accepted and new tokens), in every result, without
            `trace=True` too.
        outputs: by name what the call keeps of every new token, numbers as a float32 `[B, M]`, 0
            after a row's end, anything else as a tuple of `[B, ...]` for each column.
        tokenizer: of the target, where the call named it.
        prompts: ids of each row's prompt, without padding.
        sampling: what the tokens were drawn from (`specdec.request.Sampling`).
        row_inputs: `[B, ...]` by name, what the call brought for each row; adapters as numbers.

    Example:
        >>> import torch
        >>> from specdec import SpeculativeGenerator, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), "lookup")
        >>> result = generator.generate(torch.tensor([[5, 6]]), max_new_tokens=4)
        >>> result.sequences.shape, result.lengths, result.finish_reasons
        (torch.Size([1, 6]), [4], ['length'])
    """

    sequences: Tensor
    lengths: list[int]
    finish_reasons: list[str]
    seeds: list[int] | None
    num_draft_tokens: int = 0
    depth: int | None = None
    wall_s: float | None = None
    # A type variable has no default value of its own.
    trace: TraceOrNone = None  # type: ignore[assignment]
    steps: list[list[RowStep]] = field(default_factory=list)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    prompts: list[list[int]] = field(default_factory=list)
    sampling: Any = None
    row_inputs: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def stats(self) -> SpeculationStats:
        """Counts and rates."""
        from specdec.statistics import SpeculationStats  # of calls whose numbers somebody reads

        return SpeculationStats(
            self.steps, self.num_draft_tokens, depth=self.depth, wall_s=self.wall_s
        )

    @cached_property
    def origins(self) -> list[list[str]]:
        """Per row where each new token came from: `"accepted"`, `"recovered"` or `"bonus"`."""
        return [[kind for step in row for kind in step.kinds] for row in self.steps]

    # `Any`, so that type checkers believe a caller who reads what he has asked for.
    @property
    def scores(self) -> tuple[Tensor, ...] | Any:
        """With `output_scores`, for each column of new tokens the logits `[B, V]` that they were
        sampled from (after processors, temperature and truncation), NaN where a row has ended; else
        `None`.
        """
        return self.outputs.get("scores")

    @property
    def logits(self) -> tuple[Tensor, ...] | Any:
        """Likewise, with `output_logits`, as the target returned them."""
        return self.outputs.get("logits")

    @property
    def logprobs(self) -> Tensor | Any:
        """With `output_logprobs`, `[B, M]` float32: log-probabilities of the new tokens in the
        distribution that they were drawn from (the softmax of their `scores`), 0 after a row's end,
        so that a row's sum is that of its text; else `None`.
        """
        return self.outputs.get("logprobs")

    @property
    def raw_logprobs(self) -> Tensor | Any:
        """Likewise, in the model's own distribution (the softmax of their `logits`)."""
        return self.outputs.get("raw_logprobs")

    @property
    def new_tokens(self) -> Tensor:
        """`[B, M]` what follows the prompts in `sequences`."""
        return self.sequences[:, self.sequences.shape[1] - max(self.lengths, default=0) :]

    @property
    def texts(self) -> list[list[int]]:
        """Ids of each row's new tokens, up to its end."""
        rows = zip(self.new_tokens.tolist(), self.lengths, strict=True)
        return [ids[:length] for ids, length in rows]

    def pieces(self, row: int, tokenizer: Any = None) -> list[tuple[str, str]]:
        """The new text of a row in pieces, each with the origin of its first token.

        Args:
            row: of the batch.
            tokenizer: decodes the tokens; by default the call's own. Without any, pieces are ids.
        """
        from specdec.lab.show.text import pieces

        tokens = self.new_tokens[row, : self.lengths[row]].tolist()
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        return [(text, self.origins[row][first]) for text, first in pieces(tokenizer, tokens)]

    def to_dict(self) -> dict[str, Any]:
        """All but tokenizer and trace as tensors and plain values, by the names above, for
        `torch.save`; `torch.load(path, weights_only=True)` reads it.

        Example:
            >>> import torch
            >>> from specdec import SpeculativeGenerator, zoo
            >>> generator = SpeculativeGenerator(zoo.load_target(), "lookup")
            >>> result = generator.generate(torch.tensor([[5, 6]]), max_new_tokens=4)
            >>> result.to_dict()["stats"]["emitted"]
            [4]
        """
        plain = {name: getattr(self, name) for name in _PLAIN}
        plain["stats"] = self.stats.to_dict()
        plain["steps"] = [[step.saved() for step in row] for row in self.steps]
        plain["sampling"] = None if self.sampling is None else asdict(self.sampling)
        plain["row_inputs"] = dict(self.row_inputs)
        return {**dict.fromkeys(_OUTPUTS), **self.outputs, **plain}

    if not TYPE_CHECKING:  # a type checker finds these faults itself

        def __getitem__(self, index):
            from specdec.lab.show.misuse import refuse_index

            refuse_index(index)

        def __len__(self):
            from specdec.lab.show.misuse import refuse_length

            refuse_length()

        def __bool__(self):
            return True

        def __getattr__(self, name):
            from specdec.lab.show.misuse import refuse_name

            refuse_name(self, name)

    def __repr__(self) -> str:
        from specdec.lab.show.texts import text_of

        return text_of(self)

    def _repr_html_(self) -> str:
        from specdec.lab.show.texts import html_of

        return html_of(self)
