"""Randomness is an argument: Philox as published, no draw used twice, rows on their own seeds.

That streams, indices, positions and seeds are independent is Philox's own property: the numbers are
compared with it bit by bit.
"""

import math

import pytest
import torch
from architectures import build
from drafting import perturbed
from hypothesis import given
from hypothesis import strategies as st

from specdec import BlockSampler, ModelDrafter, Proposal, RejectionSampler, SpeculativeGenerator
from specdec.graphs.tree import copy_into, keep_rows
from specdec.samplers import (
    Drawing,
    LogitsFilter,
    Noise,
    ScriptedNoise,
    Stream,
    draw_by_inversion,
    philox,
)

WORD = 2**32
words = st.integers(0, WORD - 1)
row_seeds = st.one_of(
    st.integers(0, 2**64 - 1), st.sampled_from([0, WORD - 1, WORD, 2**63, 2**64 - 1])
)


def draws(seeds, start, width):
    """`[B, streams, width]` uniforms of one step; `start` may differ by row."""
    starts = torch.as_tensor(start).expand(len(seeds))
    step = Noise(seeds).at(starts, width)
    return torch.stack([step.uniform(stream) for stream in Stream], dim=1)


USED = {Stream.PROPOSE: [0, 1, 2], Stream.ACCEPT: [0, 1, 2], Stream.RESAMPLE: [0]}
"""Numbers that a step of K = 3 uses, as the docstring of `Stream` says."""


def decided(uniforms, sampler):
    """What drafter and sampler make of scripted numbers `[B, streams, 4]`."""
    rows, table = len(uniforms), torch.Generator().manual_seed(0)
    logits = torch.randn(2, rows, 4, 7, generator=table)
    noise, logits_filter = ScriptedNoise(uniforms), LogitsFilter(rows)
    drafting = Proposal().begin(Drawing(3, logits_filter, noise, draw_by_inversion))
    drafting.draw(logits[0, :, :3])
    draft = drafting.end()
    verdict = sampler(draft, logits[1], logits_filter, noise)
    return [*draft.tokens.flatten().tolist(), *verdict.tokens.flatten().tolist()]


@pytest.mark.parametrize("sampler", [RejectionSampler(), BlockSampler()])
def test_each_number_of_a_step_is_used_for_what_its_stream_says(sampler):
    uniforms = draws(range(500), 5, 4)
    expected = decided(uniforms, sampler)
    for stream in Stream:
        for index in range(4):
            changed = uniforms.clone()
            changed[:, stream, index] = 1 - changed[:, stream, index]
            assert (decided(changed, sampler) != expected) is (index in USED[stream])


def test_a_step_of_k_draft_tokens_has_k_plus_1_numbers_of_each_stream():
    seen = set()

    class Looks(ModelDrafter):
        def propose(self, context, state, drawing):
            widths = {drawing.noise.uniform(stream).shape[1] for stream in Stream}
            seen.add((drawing.num_draft_tokens, *widths))
            return super().propose(context, state, drawing)

    model = build("llama")
    generator = SpeculativeGenerator(model, Looks(perturbed(model), 3))
    generation = generator.start(torch.tensor([[1, 2]]), max_new_tokens=9, do_sample=True, seed=0)
    generator.step(generation)
    generation.num_draft_tokens = 1
    generator.step(generation)
    assert seen == {(3, 4), (1, 2)}


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([WORD - 1] * 4, [WORD - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    """Random123's `kat_vectors`, philox4x32 with 10 rounds."""
    words = philox(torch.tensor(counter), torch.tensor(key)).tolist()
    assert [f"{word:08x}" for word in words] == expected.split()


def plain_philox(counter, key):
    """Salmon et al., section 3.3, in Python integers."""
    (a, b, c, d), (left, right) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            second // WORD ^ b ^ left,
            second % WORD,
            first // WORD ^ d ^ right,
            first % WORD,
        )
        left, right = (left + 0x9E3779B9) % WORD, (right + 0xBB67AE85) % WORD
    return [a, b, c, d]


@given(st.lists(st.tuples(*[words] * 6), min_size=1, max_size=5))
def test_philox_is_integer_arithmetic_in_every_row(numbers):
    table = torch.tensor(numbers)
    expected = [plain_philox(row[:4], row[4:]) for row in numbers]
    assert philox(table[:, :4], table[:, 4:]).tolist() == expected


@given(
    st.lists(st.tuples(row_seeds, st.integers(0, WORD - 1)), min_size=1, max_size=4),
    st.sampled_from(list(Stream)),
    st.integers(1, 6),
)
def test_a_uniform_is_52_bits_of_philox_keyed_by_seed_position_stream_and_index(
    rows, stream, width
):
    """So it does not depend on the other rows, their order, or how many numbers are made."""
    seeds, starts = zip(*rows, strict=True)
    drawn = Noise(seeds).at(torch.tensor(starts), width).uniform(stream)
    assert drawn.dtype == torch.float64
    for (seed, start), row in zip(rows, drawn.tolist(), strict=True):
        for index in range(width):
            high, low, _, _ = plain_philox((start, index, stream, 0), (seed % WORD, seed // WORD))
            assert row[index] == (high * 2**20 + low // 2**12) / 2**52


@given(st.lists(st.tuples(row_seeds, st.integers(0, WORD - 1)), min_size=1, max_size=4))
def test_exponentials_for_a_foreign_rule_are_made_of_a_stream_of_their_own(rows):
    seeds, starts = zip(*rows, strict=True)
    drawn = Noise(seeds).at(torch.tensor(starts), 2).exponentials(3)
    for (seed, start), row in zip(rows, drawn.tolist(), strict=True):
        words = [plain_philox((start, i, 4, 0), (seed % WORD, seed // WORD)) for i in (0, 1)]
        pairs = [words[0][:2], words[0][2:], words[1][:2]]
        uniforms = [(high * 2**20 + low // 2**12) / 2**52 for high, low in pairs]
        assert row == pytest.approx([-math.log1p(-u) for u in uniforms], rel=1e-12)


def test_no_uniform_of_many_rows_and_steps_repeats():
    seeds = [0, 1, 2, 7, WORD - 1, WORD, WORD + 1, 2**63, 2**64 - 1]
    starts = torch.arange(300).repeat_interleave(len(seeds))
    drawn = draws(seeds * 300, starts, 8).flatten()
    assert len(drawn) == 300 * len(seeds) * len(Stream) * 8
    # 64 800 draws of 52 random bits repeat with probability 5e-7.
    assert len(drawn.unique()) == len(drawn)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused_with_its_row(seed):
    with pytest.raises(ValueError, match=f"seed of row 1 is {seed}"):
        Noise([0, seed])


def test_kept_rows_keep_their_draws():
    starts, rows = torch.tensor([5, 9, 2, 7]), [3, 1]
    noise = Noise([0] * 4)
    copy_into(noise, Noise([11, 2**64 - 1, 0, 8]))  # takes over their numbers
    expected = Noise([11, 2**64 - 1, 0, 8]).at(starts, 3)
    assert all(noise.at(starts, 3).uniform(s).equal(expected.uniform(s)) for s in Stream)
    whole = [noise.at(starts, 3).uniform(stream)[rows] for stream in Stream]
    step = keep_rows(noise, rows).at(starts[rows], 3)
    for stream, expected in zip(Stream, whole, strict=True):
        assert torch.equal(step.uniform(stream), expected)


def test_all_depths_of_a_step_share_one_table_of_uniforms():
    step = Noise([7, 8]).at(torch.tensor([3, 5]), width=4)
    depths = [step.at_depths(depth).uniform(Stream.PROPOSE) for depth in (0, 1)]
    assert depths[0] is depths[1] is step.uniform(Stream.PROPOSE)  # made once, not for each pass
