"""`Sampling`: the record of what a call draws its tokens from."""

from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig

from specdec.hf.generation import FILTERS


@dataclass(frozen=True)
class Sampling:
    """What a call draws its tokens from, and which tokens end its rows, as plain values.

    Traces, run files and certificates hold it; `options` is the way back.

    Args:
        temperature: of all rows, or a list of one per row; 0 is greedy.
        top_k: likewise; 0 keeps all tokens.
        top_p: likewise; 1 keeps all.
        min_p: likewise; 0 keeps all.
        eos_token_id: ids that end a row.
        settings: HF's other settings in use, by name.
        processors: class names of the logits processors that the call itself passed.

    Example:
        >>> print(Sampling(temperature=0.8, settings={"repetition_penalty": 1.2}))
        temperature 0.8, repetition_penalty 1.2
    """

    temperature: float | list[float] = 1.0
    top_k: int | list[int] = 0
    top_p: float | list[float] = 1.0
    min_p: float | list[float] = 0.0
    eos_token_id: list[int] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    processors: list[str] = field(default_factory=list)

    @property
    def logits_filter(self) -> dict[str, Any]:
        """The arguments of `LogitsFilter`."""
        return {name: getattr(self, name) for name in FILTERS}

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `generate` with which a call draws from the same, whatever the
        target's own configuration is.

        Raises:
            ValueError: the call passed logits processors, of which only the names are known.
        """
        if self.processors:
            raise ValueError(
                f"the text was drawn through logits processors ({', '.join(self.processors)}), "
                "which a record names and does not hold; pass settings of HF's generation_config, "
                "such as repetition_penalty, in their place"
            )
        options = {"neutral": True, "eos_token_id": self.eos_token_id}
        if self.settings:
            options["generation_config"] = GenerationConfig(**self.settings)
        if self.temperature == 0:
            return {**options, "do_sample": False}
        return {**options, "do_sample": True, **self.logits_filter}

    def __str__(self) -> str:
        """What is in use; the ends are left out."""
        used = {name: value for name, value in self.logits_filter.items() if value != FILTERS[name]}
        used = {"temperature": self.temperature} | used | self.settings
        parts = [f"{n} {v:g}" if type(v) is float else f"{n} {v}" for n, v in used.items()]
        return ", ".join([*parts, *self.processors])
