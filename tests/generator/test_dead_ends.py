"""A processor may leave no token after a drafted one. That is an error where the text needs a token
from there, and nothing where the draft is rejected or the text ends before.

The law is exact: 2500 texts of two tokens of a six-token target, whose second token may be one that
leads nowhere, so that steps end in such rows of the window. False-alarm rate 1e-9 per assertion;
chi-square shows a total variation of 0.114 with 99 % power.
"""

from collections import Counter

import pytest
import torch
from text_laws import ALPHA, DRAFT, PROMPT, TARGET, VOCAB, p_value, tiny
from transformers import LogitsProcessorList

from specdec import CouplingSampler, ModelDrafter, SpeculativeGenerator, Tree
from specdec.loop.outcome import Fault

ROWS, DEAD, K = 2500, 3, 3
TREE = Tree(nodes=5, depth=3, top_k=2, rates=(0.6, 0.3, 0.2))
IDS = torch.tensor([PROMPT])
DRAFTS = {
    "chain": lambda: ModelDrafter(tiny(DRAFT), K),
    "itself": lambda: ModelDrafter(tiny(TARGET), K),
    "tree": lambda: ModelDrafter(tiny(DRAFT), tree=TREE),
}
CASES = [("chain", "block"), ("itself", "rejection"), ("tree", "block"), ("tree", "coupling")]


def no_way_on(ids, scores):
    """The first new token is not `DEAD`, and nothing may follow it."""
    is_dead = (ids[:, 5:] == DEAD).any(dim=1, keepdim=True)
    scores = torch.where(is_dead, -torch.inf, scores)
    if ids.shape[1] == len(PROMPT):
        scores[:, DEAD] = -torch.inf
    return scores


no_way_on.is_stateless = True


def generator_of(draft, sampler):
    return SpeculativeGenerator(tiny(TARGET), DRAFTS[draft](), sampler)


def hooked(generator, rows, num_new, **options):
    sequences = generator.target.model.generate(
        IDS.expand(rows, -1),
        attention_mask=torch.ones(rows, len(PROMPT), dtype=torch.long),
        custom_generate=generator,
        logits_processor=LogitsProcessorList([no_way_on]),
        max_new_tokens=num_new,
        **options,
    )
    return sequences[:, len(PROMPT) :].tolist()


def law():
    """Of texts of two tokens."""
    laws = {}
    with torch.no_grad():
        for x in range(VOCAB):
            logits = tiny(TARGET)(torch.tensor([[*PROMPT, x]])).logits[0].double()
            first = no_way_on(IDS, logits[-2][None].clone())[0].softmax(dim=0)[x].item()
            second = logits[-1].softmax(dim=0).tolist()
            laws |= {(x, y): first * second[y] for y in range(VOCAB)}
    return laws


@pytest.mark.parametrize(("draft", "sampler"), CASES)
def test_texts_that_end_before_a_dead_end_have_the_targets_law(draft, sampler):
    generator, options = generator_of(draft, sampler), {"do_sample": True, "top_k": 0}
    found = Counter(map(tuple, hooked(generator, ROWS, 2, seed=list(range(ROWS)), **options)))
    assert sum(n for text, n in found.items() if text[1] == DEAD) > ROWS / 20
    assert p_value(found, law()) > ALPHA
    bent = {text: p * (2.5 if text[1] == DEAD else 1.0) for text, p in law().items()}
    bent = {text: p / sum(bent.values()) for text, p in bent.items()}
    assert p_value(found, bent) < ALPHA  # the control


@pytest.mark.parametrize("draft", DRAFTS)
def test_coupled_texts_up_to_a_dead_end_are_those_of_plain_decoding(draft):
    options = {"do_sample": True, "seed": list(range(64))}
    plain = SpeculativeGenerator(tiny(TARGET), None, CouplingSampler())
    expected = hooked(plain, 64, 2, **options)
    assert hooked(generator_of(draft, "coupling"), 64, 2, **options) == expected


@pytest.mark.parametrize("sampler", ["block", "rejection", "coupling"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_no_token_may_come_twice(sampler, do_sample):
    """Of six tokens the prompt has three, so a text may have three, and no fourth is possible."""
    generator = generator_of("itself", sampler)
    ids, seed = IDS.expand(32, -1), {"seed": list(range(32))} if do_sample else {}
    options = {"do_sample": do_sample, "no_repeat_ngram_size": 1, "custom_generate": generator}
    for num_new in (1, 2, 3):
        out = generator.target.model.generate(ids, max_new_tokens=num_new, **options, **seed)
        assert all(len(set(text)) == 3 + num_new for text in out.tolist())
    with pytest.raises(ValueError, match=r"after 3 new tokens .* processors that forbid every"):
        generator.target.model.generate(ids, max_new_tokens=4, **options, **seed)


def test_a_text_that_a_criterion_ends_before_a_dead_end_is_complete():
    """Both come in one step."""
    generator, options = generator_of("itself", "block"), {"max_new_tokens": 6, "do_sample": False}
    text = generator.generate(IDS, **options).new_tokens[0].tolist()

    def forbid(ids, scores):
        return torch.where(torch.tensor(ids.shape[1] >= 7), -torch.inf, scores)

    forbid.is_stateless = True
    options["logits_processor"] = LogitsProcessorList([forbid])
    two, three = ([lambda ids, scores, n=n: ids.shape[1] >= n] for n in (7, 8))
    result = generator.generate(IDS, **options, stopping_criteria=two)
    assert result.new_tokens[0].tolist() == text[:2]
    assert result.finish_reasons == ["stop"]
    assert len(result.steps[0]) == 1
    with pytest.raises(ValueError, match=r"after 2 new tokens .* processors that forbid every"):
        generator.generate(IDS, **options, stopping_criteria=three)


def test_whoever_steps_by_hand_is_told_how_much_of_a_step_is_sound():
    generator = generator_of("itself", "block")
    processors = LogitsProcessorList([no_way_on])
    for seed in range(40):
        options = {"do_sample": True, "seed": seed, "logits_processor": processors}
        generation = generator.start(IDS, max_new_tokens=4, **options)
        (row,) = generator.step(generation).fetch().read()
        is_at_end = DEAD in row.new_tokens[:-1]
        if is_at_end:
            break
        assert (row.faults, row.num_sound) == (0, len(row.new_tokens))
    assert is_at_end
    assert row.faults == Fault.TARGET_LOGITS
    assert row.num_sound == row.new_tokens.index(DEAD) + 1
