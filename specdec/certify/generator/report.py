"""`certify_generator`: audits and tests of a real pair of target and drafter."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index

from torch import Tensor

from specdec.arguments import check_integer, check_number
from specdec.certify.chisquare import DETECTABLE
from specdec.certify.generator.law import NUM_TOKENS, LawTest, check_enumerable, run_law_tests
from specdec.certify.generator.noise import NoiseAudit, audit_noise
from specdec.certify.generator.rows import RowsAudit, audit_rows
from specdec.certify.generator.text import TextAudit, audit_text
from specdec.generator import SpeculativeGenerator
from specdec.request import Sampling
from specdec.samplers import draw_by_race
from specdec.show.text import draft_size


@dataclass(frozen=True)
class RunReport:
    """What the audits and tests of a generator found.

    Args:
        name: of the generator.
        greedy: greedy text against plain decoding.
        noise: whether a draw was used twice; for coupled noise, which belongs to positions and is
            meant to be used again there, sampled text against plain decoding.
        rows: whether drafts and texts repeat: again, alone, in other chunks, after rows have ended.
            `None` for a drafter with memory of earlier requests, whose drafts need not repeat.
        tests: of the law of sampled texts.
        false_alarm: chance, over all tests, that a sound generator fails.
        sampling: what texts were drawn from; of the target's `generation_config` nothing.
    """

    name: str
    greedy: TextAudit
    noise: NoiseAudit | TextAudit
    rows: RowsAudit | None
    tests: list[LawTest]
    false_alarm: float
    sampling: Sampling

    @property
    def passed(self) -> bool:
        """No audit and no test found anything."""
        parts = [self.greedy, self.noise, *self.tests]
        return all(part.passed for part in parts) and (self.rows is None or self.rows.passed)

    @property
    def detectable(self) -> float:
        """Total variation of the first token's law that every prompt's test would have detected
        with 99 % power.
        """
        return max(test.detectable for test in self.tests if test.length == 1)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [
            _line(self, f"  {self.name}"),
            _line(self.greedy, f"    {self.greedy}"),
            _line(self.noise, f"    {self.noise}"),
            "----    rows: not compared, the drafter has memory of earlier requests"
            if self.rows is None
            else _line(self.rows, f"    {self.rows}"),
            f"{'PASS' if all(t.passed for t in self.tests) else 'FAIL'}    law: {self.sampling}; "
            f"false alarm {self.false_alarm:.0e} over all tests",
            "          prompt  tokens   texts  samples   p-value  detectable TV",
            *(_line(test, f"      {test}") for test in self.tests),
            f"({DETECTABLE})",
        ]
        return "\n".join(lines)


def certify_generator(
    generator: SpeculativeGenerator,
    prompts: Sequence[Sequence[int]] | Tensor,
    *,
    num_samples: int = 4096,
    num_tokens: int = NUM_TOKENS,
    top_k: int = 4,
    temperature: float = 1.0,
    audit_tokens: int = 64,
    false_alarm: float = 1e-6,
    batch_size: int = 128,
    progress: Callable[[list], Iterable] = iter,
) -> RunReport:
    """Audits greedy text, noise and rows, and tests the law of sampled text.

    Texts are drawn with temperature and top-k alone: the target's `generation_config` (its top-p,
    min-p, penalties) has no part in it, but for the ids that end a greedy text.

    Args:
        generator: of any drafter and sampler.
        prompts: token ids of each, without padding.
        num_samples: texts drawn per prompt for the law.
        num_tokens: of these texts; there are `top_k ** num_tokens` of them, at most 16384.
        top_k: while sampling.
        temperature: while sampling, > 0.
        audit_tokens: new tokens of the audits.
        false_alarm: chance that the tests of the law fail a sound generator.
        batch_size: samples drawn together.
        progress: wraps the list of batches, `tqdm` for instance.

    Raises:
        ValueError: no prompt, an empty one, one that comes twice, or too many texts to count.
    """
    plan = {"num_samples": num_samples, "num_tokens": num_tokens, "batch_size": batch_size}
    for name, count in {**plan, "top_k": top_k, "audit_tokens": audit_tokens}.items():
        check_integer(name, count, 1)
    check_number("false_alarm", false_alarm, above=0, below=1)
    check_number("temperature", temperature, above=0)
    check_enumerable(num_tokens, top_k, generator.target.vocab_size)
    prompts = _token_ids(prompts)
    sampling = Sampling(temperature=temperature, top_k=top_k)
    judging = {"sampling": sampling, "false_alarm": false_alarm, "progress": progress}
    drafter, sampler = generator.drafter, generator.sampler
    audited = generator, prompts, audit_tokens
    audit = audit_text if sampler.draw_draft is draw_by_race else audit_noise
    size = draft_size(drafter.num_draft_tokens, drafter.tree_depth)
    names = f"{type(drafter).__name__}, {type(sampler).__name__}, {size}"
    return RunReport(
        name=f"{names}, {len(prompts)} prompts",
        greedy=audit_text(*audited),
        noise=audit(*audited, sampling),
        rows=None if drafter.has_memory else audit_rows(*audited, sampling),
        tests=run_law_tests(generator, prompts, **plan, **judging),
        false_alarm=false_alarm,
        sampling=sampling,
    )


def _token_ids(prompts: Sequence[Sequence[int]] | Tensor) -> list[list[int]]:
    """Different prompts, none of them empty."""
    try:
        prompts = [[index(token) for token in prompt] for prompt in prompts]
    except TypeError as error:
        advice = "pass token ids, [tokenizer(text).input_ids for text in texts]"
        raise TypeError(f"prompts must be lists of integers: {error}; {advice}") from error
    if not prompts or not all(prompts):
        raise ValueError("expected at least one prompt, and at least one token in each")
    if len({tuple(prompt) for prompt in prompts}) < len(prompts):
        raise ValueError(
            "two prompts are equal: the second shows nothing that a larger num_samples would not; "
            "pass different prompts"
        )
    return prompts


def _line(part: object, text: str) -> str:
    return f"{'PASS' if part.passed else 'FAIL'}{text}"
