"""Edits of a target are interventions: text is that of HF's own `generate` with a hook that does
the same, and logits are those of one forward of HF's over the whole text.

HF's hook acts by the place in a call, `hidden[:, -1]`, which under HF's `generate` is every
position from the prompt's last one on. The edit says this by positions.
"""

from contextlib import contextmanager

import pytest
import torch
from architectures import VOCAB, build
from diagonal import diagonal, first
from drafting import perturbed, ragged_prompts
from refusals import refused

from specdec import (
    CouplingSampler,
    ModelDrafter,
    PromptLookupDrafter,
    SelfDrafter,
    SpeculativeGenerator,
    Target,
    Tree,
    evaluate,
    zoo,
)
from specdec.graphs.capture import CaptureError
from specdec.hf.layers import decoder_layers
from specdec.lab.certificates import certify
from specdec.lab.evaluation.hf_generate import HFGenerate
from specdec.targets import window_of, wrap_forward
from specdec.targets.trial import calls
from specdec.types import Draft

LENGTHS = 17, 3, 1, 9
IDS, MASK = ragged_prompts(VOCAB, *LENGTHS)
NUM_NEW = 14
GREEDY = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
LAYER, HEAD = 0, 2


def vector_for(model, scale=2.0):
    """A direction that changes texts."""
    width = model.config.hidden_size
    return scale * torch.randn(width, generator=torch.Generator().manual_seed(0))


def added(out, change):
    """What a decoder layer returns, with something added to its hidden states."""
    return (out[0] + change, *out[1:]) if isinstance(out, tuple) else out + change


def steering(vector):
    """An edit: a vector is added where new tokens are predicted, and nowhere in the prompt."""

    def steer(view):
        def add(forward, *args, **kwargs):
            is_new = window_of(view).since_prompt >= 0
            return added(forward(*args, **kwargs), is_new[..., None] * vector)

        wrap_forward(decoder_layers(view)[1][LAYER], add)

    return steer


def ablation(view):
    """An edit: one head of one layer writes nothing."""
    attention = view.model.layers[LAYER].self_attn
    width = attention.head_dim
    is_kept = torch.ones(attention.o_proj.in_features)
    is_kept[HEAD * width : (HEAD + 1) * width] = 0
    wrap_forward(attention.o_proj, lambda forward, x: forward(x * is_kept))


@contextmanager
def hooked(module, hook, *, before=False):
    """A model with a forward hook of the user's."""
    register = module.register_forward_pre_hook if before else module.register_forward_hook
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


def hf_steered(model, vector):
    """The common recipe."""

    def add(module, args, out):
        hidden = (out[0] if isinstance(out, tuple) else out).clone()
        hidden[:, -1] += vector
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

    return hooked(decoder_layers(model)[1][LAYER], add)


def hf_ablated(model):
    """The same as `ablation`."""
    attention = model.model.layers[LAYER].self_attn

    def zero(module, args):
        x = args[0].clone()
        x[..., HEAD * attention.head_dim : (HEAD + 1) * attention.head_dim] = 0
        return (x,)

    return hooked(attention.o_proj, zero, before=True)


def hf_rows(model, ids=IDS, lengths=LENGTHS):
    """HF's greedy texts of each row alone."""
    options, found = GREEDY | {"eos_token_id": None}, []
    for row, length in zip(ids, lengths, strict=True):
        alone = row[None, -length:]
        text = model.generate(alone, attention_mask=torch.ones_like(alone), **options)
        found.append(text[0, length:].tolist())
    return found


def texts(generator, **options):
    options = {**GREEDY, "eos_token_id": [], **options}
    return generator.generate(IDS, MASK, **options).new_tokens.tolist()


DRAFTERS = {
    "none": lambda target: None,
    "lookup": lambda target: PromptLookupDrafter(3),
    "long lookup": lambda target: PromptLookupDrafter(8),
    "model": lambda target: ModelDrafter(perturbed(target.model), 3),
    "tree": lambda target: ModelDrafter(perturbed(target.model), tree=Tree(6, 3)),
    "self": lambda target: SelfDrafter(target, 3, layers=2),
}


@pytest.mark.parametrize(
    ("name", "chunk", "graphs"),
    [
        *diagonal([*DRAFTERS][:3], [2048, 4], [False, True]),
        *diagonal([*DRAFTERS][3:], [2048, 4], [True, False]),
    ],
)
def test_steered_text_is_that_of_hf_with_the_common_hook(name, chunk, graphs):
    model = build("llama")
    vector, plain = vector_for(model), hf_rows(model)
    with hf_steered(model, vector):
        expected = hf_rows(model)
    assert all(row != other for row, other in zip(expected, plain, strict=True))
    target = Target(model, edits=(steering(vector),))
    options = {"graphs": graphs, "prefill_chunk_size": chunk}
    generator = SpeculativeGenerator(target, DRAFTERS[name](target), **options)
    for _ in range(2):  # the second call of a captured one is replayed from its first step on
        assert texts(generator) == expected
    assert hf_rows(model) == plain  # the model itself is as it was
    assert texts(SpeculativeGenerator(model, DRAFTERS[name](Target(model)))) == plain


ARCHITECTURES = ["qwen3_moe", "gemma3", "gpt2", "gptj", "llama4"]
ARCHITECTURES += ["qwen3_next", "lfm2", "falcon_gqa"]


@pytest.mark.parametrize("name", first(ARCHITECTURES, ["gpt2", "llama4"]))
def test_so_it_is_for_any_attention_and_memory(name):
    model = build(name)
    vector, plain = vector_for(model), hf_rows(model)
    with hf_steered(model, vector):
        expected = hf_rows(model)
    assert expected != plain
    generator = SpeculativeGenerator(Target(model, edits=(steering(vector),)), "lookup")
    assert texts(generator) == expected


@pytest.mark.parametrize("chunk", [2048, 4])
def test_rows_that_end_leave_the_others_their_prompts_ends(chunk):
    model, ends = build("llama"), [*range(0, VOCAB, 7)]
    target = Target(model, edits=(steering(vector_for(model)),))
    generator = SpeculativeGenerator(target, "lookup", prefill_chunk_size=chunk)
    options = GREEDY | {"eos_token_id": ends}
    result = generator.generate(IDS, MASK, **options)
    with hf_steered(model, vector_for(model)):
        expected = hf_rows(model)
    lengths = {min([row.index(t) for t in row if t in ends] + [NUM_NEW]) for row in expected}
    assert len(lengths) > 2
    for text, row in zip(result.texts, expected, strict=True):
        end = min([row.index(t) + 1 for t in row if t in ends] + [NUM_NEW])
        assert text == row[:end]


@pytest.mark.parametrize(
    ("name", "graphs"),
    diagonal(["eagle3"], [True]) + diagonal(["mask-token"], [False], is_quick=False),
)
def test_heads_of_the_zoo_draft_for_a_steered_target(name, graphs):
    model, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    ids = tokenizer("def main(argv):\n    for", return_tensors="pt").input_ids
    vector = vector_for(model, 0.4)
    with hf_steered(model, vector):
        (expected,) = hf_rows(model, ids, [ids.shape[1]])
    assert expected != hf_rows(model, ids, [ids.shape[1]])[0]
    target = Target(model, edits=(steering(vector),))
    generator = SpeculativeGenerator(target, zoo.load_drafter(name, target), graphs=graphs)
    result = generator.generate(ids, eos_token_id=[], **GREEDY)
    assert result.new_tokens[0].tolist() == expected
    assert result.stats.acceptance_length > 1.5


def scored(generator, ids, **options):
    result = generator.generate(ids, eos_token_id=[], output_logits=True, **options)
    return result.sequences[0], torch.stack(result.logits, dim=1)[0]


@pytest.mark.parametrize("sampler", ["auto", "coupling"])
@pytest.mark.parametrize("name", ["none", "lookup", "self"])
def test_distributions_are_those_of_one_forward_without_a_cache(name, sampler):
    """HF reads the whole text at once, with hooks by positions: an oracle without windows."""
    model, ids = build("llama"), IDS[:1]
    vector, start = vector_for(model), IDS.shape[1] - 1

    def steer(module, args, out):
        out = out.clone()
        out[:, start:] += vector
        return out

    target = Target(model, edits=(steering(vector), ablation))
    generator = SpeculativeGenerator(target, DRAFTERS[name](target), sampler)
    options = {"max_new_tokens": NUM_NEW, "do_sample": True, "seed": 3, "neutral": True}
    text, logits = scored(generator, ids, **options)
    with hf_ablated(model), hooked(model.model.layers[LAYER], steer), torch.no_grad():
        expected = model(text[None], use_cache=False).logits[0, start:-1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        unedited = model(text[None], use_cache=False).logits[0, start:-1]
    assert (logits - unedited).abs().amax(dim=1).min() > 0.1  # the negative control


@pytest.mark.parametrize(("name", "graphs"), diagonal(["lookup", "model", "self"], [False, True]))
def test_coupled_samples_are_those_without_a_drafter(name, graphs):
    model = build("llama")
    target = Target(model, edits=(steering(vector_for(model)),))
    options = {"do_sample": True, "temperature": 0.8, "seed": [4, 5, 6, 7]}
    expected = texts(SpeculativeGenerator(target, None), **options)
    own = DRAFTERS[name](target)
    generator = SpeculativeGenerator(target, own, CouplingSampler(), graphs=graphs)
    assert texts(generator, **options) == texts(
        SpeculativeGenerator(target, None, CouplingSampler()), **options
    )
    assert expected != texts(SpeculativeGenerator(model, None), **options)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_self_drafter_drafts_with_the_edits(graphs):
    """It is the same model, so every draft token is accepted."""
    model = build("llama")
    target = Target(model, edits=(steering(vector_for(model)),))
    other = perturbed(model, scale=0.0)
    for drafter in (SelfDrafter(target, 3), SelfDrafter(target, 3, model=other)):
        generator = SpeculativeGenerator(target, drafter, graphs=graphs)
        result = generator.generate(IDS[:1], eos_token_id=[], **GREEDY)
        assert result.stats.acceptance_length == 4
    without = SpeculativeGenerator(target, SelfDrafter(model, 3), graphs=graphs)
    assert texts(without) == texts(generator)
    assert without.last_result.stats.acceptance_length < 3


@pytest.mark.parametrize("graphs", [False, True])
def test_an_edit_reads_what_a_call_brings_for_each_row(graphs):
    model, offsets = build("llama"), [0, 7, 20, 3]
    vector = vector_for(model)

    def steer(view):
        def add(forward, *args, **kwargs):
            window = window_of(view)
            strength = window.row_inputs.get("strength")
            out = forward(*args, **kwargs)
            if strength is None:
                return out
            change = (window.since_prompt >= 0) * strength[:, None]
            return out + change[..., None] * vector

        wrap_forward(view.model.layers[LAYER], add)

    steer.row_inputs = ("strength",)
    generator = SpeculativeGenerator(Target(model, edits=(steer,)), "lookup", graphs=graphs)
    strengths = torch.tensor([0.0, 1.0, 0.5, -1.0])
    inputs = {"strength": strengths, "position_offset": offsets}
    found = texts(generator, row_inputs=inputs)
    for row, strength in enumerate(strengths):
        own = Target(model, edits=(steering(strength * vector),))
        expected = texts(SpeculativeGenerator(own, None), row_inputs={"position_offset": offsets})
        assert found[row] == expected[row]
    assert texts(generator) == texts(SpeculativeGenerator(model, None))
    with refused("an edit in its attribute row_inputs"):
        texts(SpeculativeGenerator(model, None), row_inputs={"strength": strengths})


def test_edits_stay_through_a_refresh_a_copy_and_hfs_hook():
    model = build("llama")
    vector = vector_for(model)
    target = Target(model, edits=(steering(vector),))
    generator = SpeculativeGenerator(target, "lookup")
    first = texts(generator)
    assert generator.target.with_features((1,)).edits == target.edits
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    with pytest.raises(ValueError, match=r"generator\.refresh"):
        texts(generator)
    generator.refresh()
    with hf_steered(model, vector):
        expected = hf_rows(model)
    assert texts(generator) == expected != first
    through_hf = model.generate(
        IDS, attention_mask=MASK, custom_generate=generator, **GREEDY, eos_token_id=None
    )
    assert through_hf[:, IDS.shape[1] :].tolist() == expected


def test_hooks_of_the_model_run_beside_edits():
    """A hook is the user's own code in the model, of which each call reads a few tokens."""
    model = build("llama")
    vector, other = vector_for(model), vector_for(model).flip(0)
    generator = SpeculativeGenerator(Target(model, edits=(steering(vector),)), "lookup")
    with hooked(model.model.layers[0], lambda module, args, out: out + other):
        with hf_steered(model, vector):
            expected = hf_rows(model)
        assert texts(generator) == expected
    with hf_steered(model, vector):
        without = hf_rows(model)
    assert texts(generator) == without != expected


EDITED = {"layer": "", "gate_proj": "mlp.gate_proj", "norm": "input_layernorm"}
EDITED["q"] = "self_attn.q_proj"


@pytest.fixture
def uncompiled(monkeypatch):
    """Joint products without Inductor, which takes long."""
    name = "specdec.targets.edits.fusion.torch.compile"
    monkeypatch.setattr(name, lambda function, **options: function)


@pytest.mark.parametrize("where", EDITED)
def test_what_is_done_for_speed_leaves_edited_modules_alone(where, uncompiled):
    """Joint products and compiled work would pass by what an edit has wrapped."""
    model = build("llama")

    def edit(view):
        module = view.model.layers[LAYER].get_submodule(EDITED[where])
        wrap_forward(module, lambda forward, *args, **kwargs: -3 * forward(*args, **kwargs))

    def negative(module, args, out):
        return -3 * out

    plain = hf_rows(model)
    with hooked(model.model.layers[LAYER].get_submodule(EDITED[where]), negative):
        expected = hf_rows(model)
    assert expected != plain
    target = Target(model, fuse=True, edits=(edit,))
    assert target.is_fused
    assert texts(SpeculativeGenerator(target, "lookup")) == expected


def test_a_replaced_module_is_a_modules_own(uncompiled):
    model = build("llama")
    mlp = model.model.layers[LAYER].mlp
    other = torch.nn.Linear(32, 48, bias=False)

    def edit(view):
        view.model.layers[LAYER].mlp.gate_proj = other

    targets = [Target(model, fuse=fuse, edits=(edit,)) for fuse in (False, True)]
    found = [texts(SpeculativeGenerator(target, "lookup")) for target in targets]
    own, mlp.gate_proj = mlp.gate_proj, other
    expected = hf_rows(model)
    mlp.gate_proj = own
    assert found == [expected, expected]
    assert expected != hf_rows(model)


def around(function):
    """An edit of a layer by what it returns."""

    def edit(view):
        def run(forward, *args, **kwargs):
            return function(view, forward(*args, **kwargs))

        wrap_forward(view.model.layers[LAYER], run)

    return edit


def at(*place):
    """What changes one place of what a layer returns."""

    def change(view, out):
        out = out.clone()
        out[place] += 1
        return out

    return change


def of_size(condition):
    """What looks at the numbers of rows and tokens of a forward."""
    return lambda view, out: out + 2.0 * bool(condition(*out.shape[:2]))


PLACES = {
    "the_first_row": at(0),
    "the_sixth_row": at(slice(5, 6)),
    "the_last_of_a_window": at(slice(None), -1),
    "windows_of_one_token": of_size(lambda rows, count: count == 1),
    "large_windows": of_size(lambda rows, count: count > 40),
    "several_rows": of_size(lambda rows, count: rows == 3),
    "the_slot_and_not_the_position": lambda view, out: out + 0.1 * window_of(view).slots[..., None],
    "the_mean_of_a_window": lambda view, out: out + out.mean(dim=1, keepdim=True),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_edit_that_depends_on_how_a_text_is_cut_is_refused(place):
    with refused("edits of LlamaForCausalLM (edit) depend on how a text"):
        Target(build("llama"), edits=(around(PLACES[place]),))


def by_positions(view, out):
    positions = window_of(view).text_positions
    return out + (0.1 * torch.sin(positions)[..., None]).to(out.dtype)


def a_projection(view, out):
    return out - out.mean(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    ("name", "function", "dtype"),
    diagonal(
        ["llama", "qwen3_next", "qwen3_moe"],
        [by_positions, a_projection],
        [torch.bfloat16, torch.float32],
    ),
)
def test_one_that_acts_by_positions_or_on_all_is_not(function, dtype, name):
    target = Target(build(name, dtype=dtype), edits=(around(function),))
    assert SpeculativeGenerator(target, "lookup").generate(IDS, MASK, **GREEDY)


def test_an_edit_that_fails_in_a_window_is_refused_with_its_error():
    fails = around(lambda view, out: out + window_of(view).row_inputs["strength"][:, None, None])
    with refused("fail in a window of their self-test (KeyError"):
        Target(build("llama"), edits=(fails,))
    with pytest.raises(AttributeError, match="no_such_layer"):  # its own errors come as they are
        Target(build("llama"), edits=(lambda view: view.no_such_layer,))


CHANGED = {
    "hook": lambda view: view.model.layers[0].register_forward_hook(lambda module, args, out: out),
    "pre_hook": lambda view: view.lm_head.register_forward_pre_hook(lambda module, args: None),
    "weight": lambda view: setattr(
        view.lm_head, "weight", torch.nn.Parameter(torch.zeros_like(view.lm_head.weight))
    ),
    "buffer": lambda view: view.model.norm.register_buffer("mine", torch.zeros(1)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_an_edit_that_changes_the_model_itself_is_refused_and_undone(name):
    model = build("llama")
    plain, names = hf_rows(model), {**model.state_dict()}.keys()
    with refused("<lambda> changed .. itself: a view shares hooks"):
        Target(model, edits=(CHANGED[name],))
    assert hf_rows(model) == plain
    assert not model.model.layers[0]._forward_hooks
    assert not model.lm_head._forward_pre_hooks
    assert {**model.state_dict()}.keys() == names


@pytest.mark.parametrize(
    ("edits", "what"),
    [(ablation, "a tuple of functions"), ((3,), "got 3"), ((Target,), "functions of")],
)
def test_what_is_no_tuple_of_functions_is_refused(edits, what):
    with pytest.raises(TypeError, match=f"edits must be .*{what}"):
        Target(build("llama"), edits=edits)


def test_a_window_is_asked_for_inside_of_a_forward():
    views = []
    Target(build("llama"), edits=(views.append,))
    for view in (views[0], build("llama")):
        with refused("LlamaForCausalLM runs no window"):
            window_of(view)


def test_a_loop_of_ones_own_says_where_prompts_end():
    model = build("llama")
    target = Target(model, edits=(steering(vector_for(model)),))
    cache, ids = target.init_cache(1, 32), torch.tensor([[5, 6, 7]])
    end, nothing = torch.tensor([2]), Draft(ids[:, :0])
    with pytest.raises(ValueError, match=r"set cache\.row_inputs"):
        target.prefill(cache, ids, end, offset=0)
    cache.row_inputs["prompt_end"] = end
    with torch.inference_mode():
        target.prefill(cache, ids, end, offset=0)
        logits = target.verify(cache, end, ids[:, 2], nothing).logits[0, -1]
    with hf_steered(model, vector_for(model)), torch.no_grad():
        torch.testing.assert_close(logits, model(ids).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_an_edit_that_waits_for_the_device_is_not_captured():
    def waits(view, out):
        return out + 0.0 * window_of(view).since_prompt.max().item()

    target = Target(build("llama"), edits=(around(waits),))
    assert texts(SpeculativeGenerator(target, "lookup"))
    with pytest.raises(CaptureError):
        texts(SpeculativeGenerator(target, "lookup", graphs=True))


def test_who_runs_the_model_itself_refuses_edits():
    target = Target(build("llama"), edits=(ablation,))
    with refused("HFGenerate runs the model itself"):
        HFGenerate(target)
    generator = SpeculativeGenerator(target, "lookup")
    with refused("has none of its target's edits"):
        certify(generator, IDS[:1].tolist())
    assert evaluate(generator, IDS[:1].tolist(), max_new_tokens=4).rows


def test_around_a_recurrent_mixer_positions_are_known_and_inside_they_are_not():
    """A mixer reads tokens of the last window once more."""
    model = build("qwen3_next")
    vector = vector_for(model)

    def steering_at(path):
        def edit(view):
            def add(forward, *args, **kwargs):
                is_new = window_of(view).since_prompt >= 0
                return forward(*args, **kwargs) + is_new[..., None] * vector

            wrap_forward(view.model.layers[0].get_submodule(path), add)

        return edit

    def add(module, args, out):
        out = out.clone()
        out[:, -1] += vector
        return out

    with hooked(model.model.layers[0].linear_attn, add):
        expected = hf_rows(model)
    generator = SpeculativeGenerator(Target(model, edits=(steering_at("linear_attn"),)), "lookup")
    assert texts(generator) == expected != hf_rows(model)
    with pytest.raises(ValueError, match=r"\(edit\) (fail in|depend on)"):
        Target(model, edits=(steering_at("linear_attn.norm"),))


def test_a_run_and_explain_say_what_edits_a_target():
    model = build("llama")
    found = {}
    for scale in (1.0, 2.0):
        target = Target(model, edits=(steering(vector_for(model, scale)), ablation))
        generator = SpeculativeGenerator(target, "lookup")
        assert "edited by steer, ablation" in generator.explain()
        found[scale] = evaluate(generator, [[7, 8, 9]], max_new_tokens=4).about["run"]["target"]
        names = [each["function"].rpartition(".")[2] for each in found[scale]["edits"]]
        assert names == ["steer", "ablation"]
    assert found[1.0] != found[2.0]
    plain = evaluate(SpeculativeGenerator(model, "lookup"), [[7, 8, 9]], max_new_tokens=4)
    assert "edits" not in plain.about["run"]["target"]


SIZES = {
    "a step's window": (of_size(lambda rows, count: count == 6), (8, 3), 5, 2048),
    "a shorter step": (of_size(lambda rows, count: count == 4), (8, 3), 5, 2048),
    "the chunk of a prompt": (of_size(lambda rows, count: count == 12), (13, 3), 2, 2048),
    "chunks of prompts": (of_size(lambda rows, count: count == 6), (9, 3), 2, 6),
    "later chunks": (of_size(lambda rows, count: count == 9), (20, 3), 2, 10),
    "long chunks": (of_size(lambda rows, count: count > 64), (90, 3), 2, 2048),
    "places in long chunks": (at(slice(None), slice(70, None)), (90, 3), 2, 2048),
    "rows": (of_size(lambda rows, count: rows == 6), (4,) * 6, 2, 2048),
    "rows that are left": (of_size(lambda rows, count: rows == 6), (4,) * 7, 2, 2048),
    "tokens of all rows": (of_size(lambda rows, count: rows * count > 640), (20,) * 40, 2, 2048),
    "chunks alone": (lambda view, out: out + 2.0 * window_of(view).is_chunk, (13, 3), 2, 2048),
}


OF_EAGER_CHUNKS = {"the chunk of a prompt", "long chunks", "places in long chunks"}
"""Captured chunks have 64 tokens here: these sizes come up in every call, or in none."""


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.swept)])
@pytest.mark.parametrize("name", SIZES)
def test_an_edit_that_looks_at_a_size_of_a_call_is_refused_when_the_call_comes(name, graphs):
    function, lengths, num_draft_tokens, chunk = SIZES[name]
    target = Target(build("llama"), edits=(around(function),))
    drafter = PromptLookupDrafter(num_draft_tokens)
    options = {"prefill_chunk_size": chunk, "graphs": graphs}
    generator = SpeculativeGenerator(target, drafter, **options)
    short = torch.tensor([[5, 6]])
    if graphs and name in OF_EAGER_CHUNKS:
        prompts, plain = ragged_prompts(VOCAB, *lengths), SpeculativeGenerator(build("llama"), None)
        try:
            found = generator.generate(*prompts, **GREEDY).texts
        except ValueError as error:
            assert "depend on how a text is cut into windows" in str(error)  # noqa: PT017
        else:
            assert found == plain.generate(*prompts, **GREEDY).texts
        return
    if "step" not in name and "alone" not in name:
        assert generator.generate(short, **GREEDY).texts
    for _ in range(2):  # a refusal is nothing that is remembered as tried
        with pytest.raises(ValueError, match=r"\(edit\) depend on .* not by .* tokens or rows"):
            generator.generate(*ragged_prompts(VOCAB, *lengths), **GREEDY)


def trials(monkeypatch):
    """How many windows of calls have been tried, each time."""
    found, run = [], calls.CallTrial.differences
    monkeypatch.setattr(
        calls.CallTrial,
        "differences",
        lambda trial: found.append(len(trial._windows)) or run(trial),
    )
    return found


def test_a_size_is_tried_once_and_a_model_without_edits_never(monkeypatch):
    model = build("llama")
    plain = SpeculativeGenerator(model, "lookup")
    edited = SpeculativeGenerator(Target(model, edits=(steering(vector_for(model)),)), "lookup")
    found = trials(monkeypatch)
    texts(plain)
    assert not found
    for repeats in (0, 1):
        texts(edited)
        assert len(found) == 2 * (1 - repeats)
        found.clear()
    edited.generate(IDS[:, 1:], MASK[:, 1:], **GREEDY)  # the longest prompt is shorter
    assert found == [1]


def by_strength(view, out):
    """Of a row with a strength other than 0."""
    strength = window_of(view).row_inputs.get("strength", torch.zeros(len(out)))
    return torch.cat([out[:, :-1], out[:, -1:] + strength[:, None, None]], dim=1)


@pytest.mark.parametrize("name", ["none", "lookup", "model"])
def test_an_edit_is_tried_with_what_a_call_brings_for_its_rows(name):
    model, edit = build("llama"), around(by_strength)
    edit.row_inputs = ("strength",)
    target = Target(model, edits=(edit,))
    generator = SpeculativeGenerator(target, DRAFTERS[name](target))
    assert texts(generator) == texts(SpeculativeGenerator(model, None))
    nothing = {"strength": [0.0] * 4}
    assert texts(generator, row_inputs=nothing) == texts(SpeculativeGenerator(model, None))
    with pytest.raises(ValueError, match=r"\(edit\) depend on how a text is cut"):
        texts(generator, row_inputs={"strength": [0.0, 3.0, 0.0, 0.0]})
