"""Laws 3, 9, 10 and 14, `Generation`: whatever is done to generations between their steps, rows
hold what a plain loop without caches writes.

A state machine starts generations over storage that others have given back, changes the draft
length, ends, drops and synchronizes, and compares every row with a list after every rule.
"""

from dataclasses import dataclass
from functools import cache

import torch
from eagle_heads import head_for
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mtp_heads import head_for as mtp_head_for
from text_laws import DRAFT, TARGET, VOCAB, tiny

from specdec import (
    EagleDrafter,
    ModelDrafter,
    MTPDrafter,
    PromptLookupDrafter,
    SpeculativeGenerator,
)
from specdec.loop.host import Generation

MODEL, MOST = tiny(TARGET), 3
DRAFTERS = {
    "none": lambda: None,
    "model": lambda: ModelDrafter(tiny(DRAFT), MOST),
    "lookup": lambda: PromptLookupDrafter(MOST, max_ngram=2),
    "eagle": lambda: EagleDrafter(head_for(MODEL, kind="input"), MODEL, MOST),
    "mtp": lambda: MTPDrafter(mtp_head_for(MODEL, num_depths=2), MODEL, MOST),
}


@cache
def generator_of(name: str, graphs: bool) -> SpeculativeGenerator:
    return SpeculativeGenerator(MODEL, DRAFTERS[name](), graphs=graphs, prefill_chunk_size=2)


@cache
@torch.no_grad()
def next_token(text: tuple) -> int:
    """The plain loop: one forward over the whole text, and nothing is kept but the text."""
    return int(MODEL(torch.tensor([text]), use_cache=False).logits[0, -1].argmax())


def plain_text(prompt: list, max_new_tokens: int, eos: int | None) -> list:
    text = list(prompt)
    for _ in range(max_new_tokens):
        text.append(next_token(tuple(text)))
        if text[-1] == eos:
            break
    return text


@dataclass
class Call:
    """A generation, the whole text of each row of its batch, and how far each row has come."""

    generation: Generation
    generator: SpeculativeGenerator
    texts: list
    lengths: list

    def is_over(self, row: int) -> bool:
        return self.lengths[row] == len(self.texts[row])


class GenerationsAgainstLists(RuleBasedStateMachine):
    """At most two generations at a time; `calls` is what they should hold."""

    def __init__(self):
        super().__init__()
        self.calls = []

    @precondition(lambda self: len(self.calls) < 2)
    @rule(
        name=st.sampled_from(list(DRAFTERS)),
        graphs=st.booleans(),
        prompts=st.lists(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), min_size=2, max_size=4
        ),
        max_new_tokens=st.integers(1, 14),
        eos=st.none() | st.integers(0, VOCAB - 1),
        is_left=st.booleans(),
    )
    def start(self, name, graphs, prompts, max_new_tokens, eos, is_left):
        width = max(map(len, prompts))
        ids, mask = (torch.zeros(len(prompts), width, dtype=torch.long) for _ in range(2))
        for row, prompt in enumerate(prompts):
            where = slice(width - len(prompt), None) if is_left else slice(len(prompt))
            ids[row, where], mask[row, where] = torch.tensor(prompt), 1
        generator = generator_of(name, graphs)
        generation = generator.start(ids, mask, max_new_tokens=max_new_tokens, eos_token_id=eos)
        texts = [plain_text(prompt, max_new_tokens, eos) for prompt in prompts]
        self.calls.append(Call(generation, generator, texts, [len(prompt) for prompt in prompts]))

    def pick(self, data) -> Call:
        return data.draw(st.sampled_from(self.calls))

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), count=st.integers(0, MOST))
    def set_the_draft_length(self, data, count):
        call = self.pick(data)
        call.generation.num_draft_tokens = min(count, call.generator.drafter.num_draft_tokens)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def step(self, data):
        call = self.pick(data)
        generation = call.generation
        outcomes = call.generator.step(generation).fetch().read()
        assert len(outcomes) == len(generation.rows)
        for row, outcome in zip(generation.rows, outcomes, strict=True):
            assert outcome.faults == 0
            assert outcome.num_accepted <= len(outcome.draft_tokens) <= generation.num_draft_tokens
            room = len(call.texts[row]) - call.lengths[row]
            new = min(outcome.num_accepted + 1, room)
            begin = call.lengths[row]
            call.lengths[row] += new
            assert list(outcome.new_tokens) == call.texts[row][begin : begin + new]

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), is_dropped=st.booleans())
    def end_rows(self, data, is_dropped):
        call = self.pick(data)
        row = data.draw(st.integers(0, len(call.texts) - 1))
        call.generation.end_rows([row])
        call.texts[row] = call.texts[row][: call.lengths[row]]
        if is_dropped:
            self.drop(call)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def drop_ended(self, data):
        self.drop(self.pick(data))

    def drop(self, call: Call):
        before = set(call.generation.rows)
        call.generation.drop_ended()
        over = {row for row in before if call.is_over(row)}
        assert set(call.generation.rows) in (before, before - over)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def synchronize(self, data):
        self.pick(data).generation.synchronize()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def close(self, data):
        """Its storage is the next call's."""
        call = self.pick(data)
        call.generation.close()
        self.calls.remove(call)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def release(self, data):
        self.pick(data).generator.release()

    @invariant()
    def rows_hold_what_the_plain_loop_writes(self):
        for call in self.calls:
            generation = call.generation
            lengths, ended = generation.lengths.tolist(), generation.has_ended.tolist()
            for index, row in enumerate(generation.rows):
                assert lengths[index] == call.lengths[row]
                text = call.texts[row][: call.lengths[row]]
                assert generation.tokens[index, : lengths[index]].tolist() == text
                assert ended[index] == call.is_over(row)


TestGenerationsAgainstLists = GenerationsAgainstLists.TestCase
TestGenerationsAgainstLists.settings = settings(max_examples=25, stateful_step_count=30)
