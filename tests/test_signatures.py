"""Signatures that editors and notebooks complete: real names and defaults, and the class that a
name leads to.
"""

import inspect
import pydoc
import tomllib
from pathlib import Path
from typing import get_args, get_overloads

import pytest
import torch

import specdec
from specdec import certify, zoo
from specdec.lab.certificates import ForeignBatchSampler, ForeignSampler
from specdec.lab.certificates.generator.report import certify_generator
from specdec.lab.certificates.sampler.exact import certify_sampler


def keywords_of(function):
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.kind is p.KEYWORD_ONLY}


def test_each_way_into_certify_has_the_parameters_of_its_function_and_a_docstring():
    ways = certify_sampler, certify_generator
    for one, way in zip(get_overloads(certify), ways, strict=True):
        (_, *own), (_, *its) = (inspect.signature(f).parameters.values() for f in (one, way))
        assert own == its
        assert way.__name__ in one.__doc__


def test_a_notebook_completes_the_options_of_both_ways():
    both = keywords_of(certify_sampler) | keywords_of(certify_generator)
    assert keywords_of(certify) == both
    assert [*inspect.signature(certify).parameters][:2] == ["subject", "prompts"]


def test_names_of_the_zoo_are_literals_and_lead_to_their_classes():
    assert get_args(zoo.Name) == tuple(zoo.DRAFTERS)
    target = zoo.load_target(dtype=torch.bfloat16)
    *named, any_name = get_overloads(zoo.load_drafter)
    assert len(named) == len(zoo.DRAFTERS)
    assert any_name.__annotations__["name"] == "str"
    for one, name in zip(named, zoo.DRAFTERS, strict=True):
        assert one.__annotations__["name"] == f"Literal[{name!r}]"
        drafter = zoo.load_drafter(name, target, tree=None if name == "mtp" else "4x2")
        assert one.__annotations__["return"] == type(drafter).__name__
    assert keywords_of(zoo.load_drafter).keys() == zoo.DrafterOptions.__annotations__.keys()


def test_every_option_of_a_call_completes_and_helps():
    names = specdec.GenerateOptions.__annotations__.keys()
    own = {"generate": {"streamer", "trace", "check"}, "stream": set(), "start": set()}
    for name, others in own.items():
        method = getattr(specdec.SpeculativeGenerator, name)
        parameters = inspect.signature(method).parameters
        assert [*parameters][:3] == ["self", "input_ids", "attention_mask"]
        assert keywords_of(method).keys() == others | names
        assert all(keywords_of(method)[option] is ... for option in names)
        assert parameters["seed"].annotation == "int | list[int] | None"
        assert "output_logprobs: 'bool | None' = Ellipsis" in pydoc.plain(pydoc.render_doc(method))
        with pytest.raises(TypeError, match="typo"):
            inspect.signature(method).bind(None, None, typo=1)


def test_an_option_that_is_none_is_left_out():
    generator = specdec.SpeculativeGenerator(zoo.load_target(), None)
    names = specdec.GenerateOptions.__annotations__
    options = dict.fromkeys(names) | {"max_new_tokens": 4}
    ids = torch.tensor([[7, 8, 9]])
    found = [generator.generate(ids, **o) for o in (options, {"max_new_tokens": 4})]
    assert found[0].sequences.equal(found[1].sequences)


def test_a_foreign_sampler_and_a_batch_of_it_take_the_same():
    assert keywords_of(ForeignSampler) == keywords_of(ForeignBatchSampler)


def test_the_package_says_that_it_has_types():
    assert (Path(specdec.__file__).parent / "py.typed").is_file()
    project = tomllib.loads((Path(specdec.__file__).parents[1] / "pyproject.toml").read_text())
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["specdec"]
