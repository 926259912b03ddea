"""`certify_generator`: audits of a real pair of target and drafter, and bets along its texts."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from specdec.arguments import check_function, check_integer, check_number, shown
from specdec.generator import SpeculativeGenerator
from specdec.hf.generation import FILTERS
from specdec.lab.certificates.bar import BAR
from specdec.lab.certificates.generator.along import (
    Sentinel,
    TextTest,
    check_generator,
    check_reference,
)
from specdec.lab.certificates.generator.drafts import DraftsAudit, audit_drafts
from specdec.lab.certificates.generator.noise import NoiseAudit, audit_noise
from specdec.lab.certificates.generator.reading import inputs_of
from specdec.lab.certificates.generator.rows import RowsAudit, audit_rows
from specdec.lab.certificates.generator.text import TextAudit, audit_text
from specdec.lab.show.text import draft_size
from specdec.request import Sampling
from specdec.request.given import ids_of
from specdec.request.lists import id_lists, left_padded
from specdec.samplers import draw_by_race
from specdec.settings import called


@dataclass(frozen=True)
class RunReport:
    """What the audits and tests of a generator found.

    Args:
        name: of the generator.
        greedy: greedy text against HF's own forward of each text.
        noise: whether a draw was used twice; for coupled noise, which belongs to positions and is
            meant to be used again there, sampled text against HF's own forward.
        rows: whether drafts and texts repeat: again, alone, in other chunks, after rows have ended.
            `None` for a drafter with memory of earlier requests, whose drafts need not repeat.
        drafts: whether drafts are those that are made anew from each text; `None` for drafters that
            cannot make them (`audit_drafts`).
        text: bets along sampled texts.
        settings: what these were drawn with, in turn.
        seconds: that drawing and reading them took.
        target_bias: the total variation that was to be seen, or `None`.
        accepted_per_step: mean number of draft tokens that the steps of the sampled texts accepted.

    Example:
        >>> from specdec import SpeculativeGenerator, certify, zoo
        >>> generator = SpeculativeGenerator(zoo.load_drafter("model").model, None)  # of one layer
        >>> few = {"num_samples": 1, "max_new_tokens": 1, "audit_tokens": 1}
        >>> report = certify(generator, [[5, 6, 7]], **few)
        >>> report.verdict, report.text.num_tokens
        ('PASS', 1)
    """

    name: str
    greedy: TextAudit
    noise: NoiseAudit | TextAudit
    rows: RowsAudit | None
    drafts: DraftsAudit | None
    text: TextTest
    settings: Sequence[Mapping[str, Any]]
    seconds: float
    target_bias: float | None = None
    accepted_per_step: float = math.nan

    @property
    def passed(self) -> bool:
        """No audit and no test found anything; `text.detectable` says what would have been."""
        return self.text.passed and self._are_audits_passed

    @property
    def _are_audits_passed(self) -> bool:
        audits = self.greedy, self.noise, self.rows, self.drafts
        return all(audit is None or audit.passed for audit in audits)

    @property
    def verdict(self) -> str:
        """`"PASS"`; `"LOSSY"` where only that was found which the rule declares; else `"FAIL"`."""
        return self._text_verdict if self._are_audits_passed else "FAIL"

    @property
    def _text_verdict(self) -> str:
        return "PASS" if self.text.passed else "FAIL" if self.text.is_lossless else "LOSSY"

    @property
    def _declared(self) -> str:
        """A rule that is declared lossy passes where too few tokens were read to see its loss."""
        is_quiet = self.verdict == "PASS" and not self.text.is_lossless
        return ": declared lossy, and no loss was seen in these texts" if is_quiet else ""

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [
            f"{self.verdict}  {self.name}{self._declared}",
            _line(self.greedy, f"    {self.greedy}"),
            _line(self.noise, f"    {self.noise}"),
            "----    rows: not compared, the drafter has memory of earlier requests"
            if self.rows is None
            else _line(self.rows, f"    {self.rows}"),
            *([] if self.drafts is None else [_line(self.drafts, f"    {self.drafts}")]),
            f"{self._text_verdict}    {self.text}",
            f"          accepted per step: {self.accepted_per_step:.2f} draft tokens",
            f"          drawn with: {'; '.join(map(_shown, self.settings))}",
        ]
        if self.target_bias is not None and self.text.detectable > self.target_bias:
            count = self.text.tokens_for(self.target_bias)
            minutes = self.seconds * count / self.text.num_tokens / 60
            lines.append(
                f"          to see {self.target_bias:.2%} takes {count} tokens in all, about "
                f"{minutes:.1f} min here; until_sure=True (--until-sure) goes on until then"
            )
        return "\n".join(lines)


def certify_generator(
    generator: SpeculativeGenerator,
    prompts: Sequence[Sequence[int]] | Sequence[Mapping[str, Any]] | Tensor,
    *,
    num_samples: int = 64,
    max_new_tokens: int = 64,
    settings: Sequence[Mapping[str, Any]] = ({"temperature": 1.0},),
    target_bias: float | None = None,
    until_sure: bool = False,
    audit_tokens: int = 64,
    false_alarm: float = 1e-6,
    batch_size: int = 64,
    reference: PreTrainedModel | None = None,
    progress: Callable[[list], Iterable] = BAR,
) -> RunReport:
    """Audits greedy text, noise and rows, and bets along sampled texts against the claim that they
    have the target's distribution (`docs/certificates.md` says how, and what a pass means).

    Texts are drawn by untruncated sampling at temperature 1, changed by `settings` alone. Of the
    target's `generation_config` only the ids that end a greedy text are used.

    Args:
        generator: of any drafter and sampler.
        prompts: token ids of each, without padding; or what the target's processor returns for
            each, where they are more than ids.
        num_samples: texts drawn per prompt.
        max_new_tokens: of each of these.
        settings: options of `generate` (temperature, top_p, logits_processor, generation_config,
            ...), the same for all rows of a batch, but `row_inputs` with a value per prompt;
            batches take them in turn. The first one's temperature, truncation and row inputs are
            those of the audits. The ends of texts are ignored but for `eos_token_id`.
        target_bias: a total variation that is to be seen with 95 %; the report says how many tokens
            and how much time that takes.
        until_sure: draws on until a fault is found or `target_bias` would have been.
        audit_tokens: new tokens of the audits.
        false_alarm: chance that the bets fail a sound generator.
        batch_size: texts drawn together.
        reference: a model whose forwards count in place of the target's own, for instance a copy in
            float32.
        progress: wraps the list of batches; `BAR` shows long calls on terminals, `iter` nothing.

    Raises:
        TypeError, ValueError: no generator; no prompt, an empty one, one that comes twice; greedy
            settings, or such as are decided elsewhere (`max_new_tokens`, `seed`); row inputs
            without a value for each prompt; `until_sure` without a `target_bias`; a reference of
            another vocabulary.
    """
    check_generator(generator)
    counts = {
        "num_samples": num_samples,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
    }
    for name, count in {**counts, "audit_tokens": audit_tokens}.items():
        check_integer(name, count, 1)
    check_number("false_alarm", false_alarm, above=0, below=1)
    if target_bias is not None:
        check_number("target_bias", target_bias, above=0, below=1)
    if until_sure and target_bias is None:
        raise ValueError("until_sure goes on until target_bias would have been seen; pass one")
    check_reference(reference, generator.target)
    check_function("progress", progress, "one that wraps a list, such as tqdm")
    prompts, inputs = _token_ids(prompts)
    if generator.target.reads_source and inputs is None:
        raise ValueError(
            "expected prompts with sources, since the target has an encoder; pass dicts of "
            "decoder_input_ids [1, T] beside input_ids or input_features [1, ...]"
        )
    settings = _settings(settings, len(prompts))
    if inputs is not None:
        given = [dict(each.get("row_inputs") or {}, prompt=inputs) for each in settings]
        settings = [{**s, "row_inputs": own} for s, own in zip(settings, given, strict=True)]
    drafter, sampler = generator.drafter, generator.sampler
    sampling = Sampling(**{name: each for name, each in settings[0].items() if name in FILTERS})
    audited, own = (generator, prompts, audit_tokens), settings[0].get("row_inputs")
    audit = audit_text if sampler.draw_draft is draw_by_race else audit_noise
    size = draft_size(drafter.num_draft_tokens, drafter.tree_depth)
    names = f"{type(drafter).__name__}, {called(sampler.settings())}, {size}"
    audits = {
        "greedy": audit_text(*audited, row_inputs=own),
        "noise": audit(*audited, sampling, own),
        "rows": None if drafter.has_memory else audit_rows(*audited, sampling, own),
        "drafts": audit_drafts(*audited, own),
    }
    sentinel = Sentinel(
        generator, false_alarm=false_alarm, with_drafts=True, reference=reference, raises=False
    )
    started, first, counts = time.perf_counter(), 0, []
    while True:
        last = first + num_samples
        rows = [(number, i) for i in range(first, last) for number in range(len(prompts))]
        starts = range(0, len(rows), batch_size)
        for turn, start in progress(list(enumerate(starts, first * len(prompts)))):
            batch, options = rows[start : start + batch_size], settings[turn % len(settings)]
            counts += _draw(generator, sentinel, prompts, batch, max_new_tokens, options)
            if sentinel.found.impossible or sentinel.found.log_e > -math.log(false_alarm):
                break
        found = sentinel.found
        if not until_sure or not found.passed or found.detectable <= target_bias:
            break
        first = last
    return RunReport(
        name=f"{names}, {len(prompts)} prompts",
        **audits,
        text=found,
        settings=settings,
        seconds=time.perf_counter() - started,
        target_bias=target_bias,
        accepted_per_step=sum(counts) / len(counts),
    )


def _draw(
    generator: SpeculativeGenerator,
    sentinel: Sentinel,
    prompts: list[list[int]],
    rows: list[tuple[int, int]],
    max_new_tokens: int,
    options: Mapping[str, Any],
) -> list[int]:
    """Draws one text per (number of a prompt, number of its sample), and bets along them. Returns
    how many draft tokens each step accepted.
    """
    # No seed comes twice, and none is one of the audits': a drafter with memory must not draft from
    # a text that the same noise has written.
    seeds = [((number + 1) << 32) + sample for number, sample in rows]
    used = {"temperature": 1.0, "neutral": True, "eos_token_id": [], **options}
    numbers = [number for number, _ in rows]
    used["row_inputs"] = inputs_of(used.get("row_inputs"), numbers)
    beginnings = [prompts[number] for number in numbers]
    result = generator.generate(
        *left_padded(beginnings, generator.target.device),
        **{**used, "max_new_tokens": max_new_tokens, "output_scores": True, "seed": seeds},
    )
    pairs = zip(result.new_tokens.tolist(), result.lengths, strict=True)
    texts = [text[:length] for text, length in pairs]
    sentinel(beginnings, texts, steps=result.steps, scores=result.scores, **used)
    return [step.num_accepted for row in result.steps for step in row]


_DECIDED = {
    "max_new_tokens": "max_new_tokens beside settings",
    "num_return_sequences": "num_samples, which draws so many texts of each prompt",
    "seed": "nothing: each text has a seed of its own",
}
"""Options of `generate` that certificates decide, and what to pass in their place."""


def _settings(settings: Any, num_prompts: int) -> list[Mapping[str, Any]]:
    """Options of `generate`, checked for what would be ignored or misread."""
    advice = "settings must be a list of options of generate, one or more, each a dict such as"
    is_list = isinstance(settings, Sequence) and not isinstance(settings, str) and len(settings)
    if not is_list:
        raise TypeError(f"{advice} {{'temperature': 0.7}}, got {shown(settings)}")
    for number, each in enumerate(settings):
        if not isinstance(each, Mapping):
            raise TypeError(f"{advice} {{'temperature': 0.7}}; settings[{number}] is {shown(each)}")
        for name in each:
            if not isinstance(name, str):
                raise TypeError(f"{advice} {{'temperature': 0.7}}; {shown(name)} names no option")
        if each.get("temperature") is not None:
            check_number("temperature", each["temperature"], above=0)
        for name, instead in _DECIDED.items():
            if each.get(name) is not None:
                raise ValueError(
                    f"settings[{number}] has {name}={shown(each[name])}, which a certificate "
                    f"decides; pass {instead}"
                )
        own = each.get("row_inputs")
        if own is not None and not isinstance(own, Mapping):
            raise TypeError(f"row_inputs must be a dict of values by name, got {shown(own)}")
        for name, values in (own or {}).items():
            has_rows = hasattr(values, "__len__") and not isinstance(values, str | Mapping)
            has_rows = has_rows and getattr(values, "shape", (1,)) != ()
            if not has_rows or len(values) != num_prompts:
                raise ValueError(
                    f"row_inputs[{name!r}] must have one value for each of the {num_prompts} "
                    f"prompts, got {shown(values)}"
                )
    return [*settings]


def _shown(options: Mapping[str, Any]) -> str:
    """Options in words; objects by their class."""
    plain = int | float | str
    named = {n: v if isinstance(v, plain) else type(v).__name__ for n, v in options.items()}
    if own := options.get("row_inputs"):
        named["row_inputs"] = ", ".join(own)
    return ", ".join(f"{name} {value}" for name, value in named.items()) or "temperature 1.0"


def _token_ids(
    prompts: Sequence[Sequence[int]] | Sequence[Mapping[str, Any]] | Tensor,
) -> tuple[list[list[int]], list[Mapping[str, Any] | None] | None]:
    """Different prompts, none of them empty; and what they are beside ids, if any is more."""
    inputs = None
    is_list = isinstance(prompts, list | tuple)
    if is_list and any(isinstance(one, Mapping) for one in prompts):
        inputs = [one if isinstance(one, Mapping) else None for one in prompts]
        prompts = [ids_of(one) if isinstance(one, Mapping) else one for one in prompts]
    prompts = id_lists("prompts", prompts)
    if inputs is None and len({tuple(prompt) for prompt in prompts}) < len(prompts):
        raise ValueError(
            "two prompts are equal: the second shows nothing that a larger num_samples would not; "
            "pass different prompts"
        )
    return prompts, inputs


def _line(part: object, text: str) -> str:
    return f"{'PASS' if part.passed else 'FAIL'}{text}"
