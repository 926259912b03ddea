"""`Sampling`: the record of what a call draws its tokens from, and the neutral configuration."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from specdec.hf import BEFORE_WARPS, BESIDE_WARPS, WARPS


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

    @classmethod
    def resolved(cls, config: GenerationConfig, eos_token_id: list[int]) -> "Sampling":
        """The record of a configuration that HF has filled up."""
        if not config.do_sample:
            settings = _in_use(config, BEFORE_WARPS)
            return cls(temperature=0.0, eos_token_id=eos_token_id, settings=settings)
        settings = _in_use(config, BEFORE_WARPS | BESIDE_WARPS)
        return cls(**_in_use(config, WARPS), eos_token_id=eos_token_id, settings=settings)

    @property
    def warp(self) -> dict[str, Any]:
        """The arguments of `Warp`."""
        return {name: getattr(self, name) for name in WARPS}

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
        return {**options, "do_sample": True, **self.warp}

    def __str__(self) -> str:
        """What is in use; the ends are left out."""
        used = {name: value for name, value in self.warp.items() if value != WARPS[name]}
        used = {"temperature": self.temperature} | used | self.settings
        parts = [f"{n} {v:g}" if type(v) is float else f"{n} {v}" for n, v in used.items()]
        return ", ".join([*parts, *self.processors])


def with_config(model: PreTrainedModel, config: GenerationConfig) -> PreTrainedModel:
    """The same model, as HF resolves options with another configuration; the model is left as it
    is.
    """
    other = copy.copy(model)
    other.generation_config = config
    return other


def neutral(model: PreTrainedModel) -> PreTrainedModel:
    """A shallow copy of a model, over the same weights, whose `generation_config` sets nothing but
    the ids that begin, end and pad a text.
    """
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(model.generation_config, name) for name in names}
    return with_config(model, GenerationConfig(**ids))


def _in_use(config: GenerationConfig, names: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of these names that differ from the value that does nothing."""
    values = {name: getattr(config, name, None) for name in names}
    return {n: _plain(v) for n, v in values.items() if v is not None and v != names[n]}


def _plain(value: Any) -> Any:
    """A setting as JSON can hold it, in a form that HF takes as well."""
    if hasattr(value, "to_dict"):  # WatermarkingConfig
        return value.to_dict()
    if isinstance(value, Mapping):  # sequence_bias: by tuples of ids
        return [[list(key), item] for key, item in value.items()]
    return list(value) if isinstance(value, tuple) else value
