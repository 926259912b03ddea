"""Options that are like those of the call before are not resolved again, and nothing else is."""

import copy
import itertools
import pickle
import random
from dataclasses import fields
from unittest.mock import patch

import pytest
import torch
from architectures import build
from transformers import GenerationConfig, LogitsProcessorList

from specdec import SpeculativeGenerator, Target
from specdec.request import options as module
from specdec.request.call import read_options
from specdec.request.options import LastOptions, resolve_options

IDS = torch.arange(24).view(3, 8)


def shown(options):
    """All that options hold, but for the function that makes processors."""
    names = {field.name for field in fields(options)} - {"processors_alone"}
    kinds = {name: getattr(options, name) for name in names}
    lists = {name: [type(p) for p in kinds.pop(name)] for name in ("processors", "criteria")}
    return repr((sorted(kinds.items()), lists))


def answer(target, ids, given, resolve):
    """What reading a call comes to: its options, or its error."""
    try:
        return shown(read_options(target, ids, dict(given), resolve))
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def changes(target):
    """Functions that change a call or the model, some of them back and forth."""
    model, temperatures, config = target.model, [0.5, 1.0, 0.0], GenerationConfig(top_k=4)
    ends = model.generation_config.eos_token_id = [3]

    def settings(owner, **values):
        return lambda given: [setattr(owner, name, value) for name, value in values.items()]

    def options(**values):
        return lambda given: given.update(values)

    def lists(given):
        given["temperature"] = temperatures
        temperatures[random.randrange(3)] += 0.25

    yield from [options(temperature=t) for t in (0, 0.0, 1, 1.0, True, 0.7, None)]
    yield from [options(do_sample=flag) for flag in (True, False, None)]
    yield from [options(top_k=k) for k in (0, 5, 5.0, None)]
    yield from [options(max_new_tokens=n) for n in (5, 6, None)]
    yield from [options(eos_token_id=e) for e in ([], 7, [7, 8], None)]
    yield from [options(num_return_sequences=n, neutral=n == 2) for n in (2, None)]
    yield from [options(generation_config=c) for c in (config, None)]
    yield from [options(min_new_tokens=n) for n in (2, None)]
    yield from [options(logits_processor=p) for p in (LogitsProcessorList(), None)]
    yield from [options(stopping_criteria=c) for c in ([lambda ids, scores: False], None)]
    yield from [settings(config, top_p=p) for p in (0.5, 1.0)]
    yield from [settings(config, max_length=n) for n in (30, None)]
    yield from [settings(model.generation_config, temperature=t) for t in (0.3, None)]
    yield from [settings(model.generation_config, max_length=n) for n in (40, None)]
    yield from [settings(model.generation_config, repetition_penalty=p) for p in (1.5, None)]
    yield from [lambda given: ends.append(4), lambda given: ends.clear(), lists]


@pytest.mark.parametrize("seed", range(3))
def test_remembered_options_are_those_that_would_be_resolved(seed):
    random.seed(seed)
    target, last = Target(copy.deepcopy(build("llama"))), LastOptions()
    given, known = {"max_new_tokens": 5}, list(changes(target))
    num_resolved, num_calls = 0, 0
    for index in range(160):
        if index % 8 == 0:
            given.clear()
            given["max_new_tokens"] = 5
            for name in ("temperature", "max_length", "repetition_penalty"):
                setattr(target.model.generation_config, name, None)
        if random.random() < 0.5:
            random.choice(known)(given)
        ids = IDS[: random.choice((2, 3)), : random.choice((1, 4, 8))]
        with patch.object(module, "resolve_options", wraps=resolve_options) as resolving:
            found = answer(target, ids, given, last)
        num_resolved, num_calls = num_resolved + resolving.call_count, num_calls + 1
        assert found == answer(target, ids, given, resolve_options)
    assert 0 < num_resolved < num_calls


def test_calls_of_a_generator_that_are_alike_are_resolved_once():
    generator = SpeculativeGenerator(build("llama"), "lookup")
    with patch.object(module, "resolve_options", wraps=resolve_options) as resolving:
        for width, seed in itertools.product((3, 8), (1, 2)):
            options = {"do_sample": True, "top_k": 0, "seed": seed, "max_new_tokens": 5}
            found = generator.generate(IDS[:, :width], **options)
            assert found.sequences.shape == (3, width + 5)
    assert resolving.call_count == 1
    assert pickle.loads(pickle.dumps(generator._resolve))._last is None
