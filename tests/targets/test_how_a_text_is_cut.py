"""What depends on how a text is cut into calls, and what runs in a model beside HF's code, is equal
to HF's own `generate`, or refused in words; nothing is silently another text.

The witness is HF's `generate` of the model as it is, with its hooks, attention functions and
windows.
"""

import itertools
import sys
from functools import partial

import pytest
import torch
import transformers
from architectures import VOCAB, build
from diagonal import diagonal, first
from drafting import ragged_prompts
from encoder_decoders import build_whole
from refusals import refused
from torch import nn
from torch.nn.utils import parametrize
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from specdec import PromptLookupDrafter, SpeculativeGenerator, Target
from specdec.arguments import name_of
from specdec.hf.foreign import has_own_code
from specdec.hf.lookups import code_of
from specdec.targets.edits import own_attention
from specdec.targets.source import CausalDecoder

WINDOWS = [5, 12, 30, 70, 255]


def gpt_neo(window: int, num_positions: int = 512):
    """Every second layer is local, by a buffer that HF indexes by the number of keys."""
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        **{"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4},
        **{"attention_types": [[["global", "local"], 1]], "window_size": window},
        **{"max_position_embeddings": num_positions, "initializer_range": 0.2},
    )
    return transformers.GPTNeoForCausalLM(config).eval()


def hf_text(model, ids, count: int = 12) -> list[int]:
    """HF's greedy text of one row."""
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, pad_token_id=0, **options)[0].tolist()


def is_equal_or_refused(model, generator=None, *, length: int = 9, count: int = 12) -> str:
    """'equal' or the words of a refusal; fails for any other text than HF's."""
    ids = (torch.arange(length) * 5 % (VOCAB - 1) + 1)[None]
    expected = hf_text(model, ids, count)
    short = ids[:, 2:]
    of_short = hf_text(model, short, count)
    options = {"max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
    try:
        target = None if generator else Target(model)
        drafters = [None, "lookup", "self:64"] if generator is None else [generator]
        for drafter in drafters:
            made = drafter if generator else SpeculativeGenerator(target, drafter)
            assert made.generate(ids, **options).sequences[0].tolist() == expected
            ragged = torch.cat([torch.nn.functional.pad(short, (2, 0)), ids])
            mask = torch.ones_like(ragged)
            mask[0, :2] = 0
            rows = made.generate(ragged, mask, **options).new_tokens.tolist()
            assert rows[1] == expected[length:]
            assert rows[0] == of_short[length - 2 :]
    except ValueError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_by_the_number_of_keys_is_seen(window, monkeypatch):
    """Where nothing in a view makes it one by positions."""
    monkeypatch.setattr(own_attention, "edit", lambda view, attention: None)
    found = is_equal_or_refused(gpt_neo(window), length=window - 2, count=60)
    assert "GPTNeoForCausalLM cannot be decoded over specdec's cache" in found
    assert "differs from its plain forward" in found


@pytest.mark.parametrize("window", first(WINDOWS, [5, 70]))
def test_such_a_window_is_made_one_by_positions(window):
    assert is_equal_or_refused(gpt_neo(window), length=window - 2, count=60) == "equal"


def test_the_same_model_is_decoded_where_its_positions_end_with_the_window():
    assert is_equal_or_refused(gpt_neo(128, 128), length=60, count=60) == "equal"


VECTOR = torch.randn(32, generator=torch.Generator().manual_seed(0)) * 2
CALLS = itertools.count()


def without_a_direction(module, args, out):
    unit = VECTOR / VECTOR.norm()
    return out - (out @ unit)[..., None] * unit


def at(*place):
    """A hook that changes one place of what a module returns."""

    def hook(module, args, out):
        out = out.clone()
        out[place] += VECTOR
        return out

    return hook


def where(condition):
    """A hook that changes all of it in calls of some numbers of rows and tokens."""
    return lambda module, args, out: out + VECTOR * bool(condition(*out.shape[:2]))


def every_position(module, args, out):
    return out + VECTOR


the_last_token = at(slice(None), -1)
PLACES = {
    "the_last_token": the_last_token,
    "the_first_column": at(slice(None), 0),
    "calls_of_one_token": where(lambda rows, count: count == 1),
    "calls_of_several": where(lambda rows, count: count > 1),
    "the_mean_of_a_call": lambda module, args, out: out + out.mean(dim=1, keepdim=True),
    "every_second_call": where(lambda rows, count: next(CALLS) % 2),
    "the_first_row": at(0),
    "the_sixth_row": at(slice(5, 6)),
}
SOUND = {"every_position": every_position, "without_a_direction": without_a_direction}


def before_the_layer(hook):
    """The same for the input of a module."""
    return lambda module, args: (hook(module, args, args[0]), *args[1:])


WHERE = ["model.layers.1", "model.layers.0.mlp", "model.layers.2.self_attn.o_proj", "model.norm"]
WHERE += ["model.embed_tokens", "model.layers.2"]


CASES = diagonal(PLACES, WHERE, ["before"])
CASES += diagonal(PLACES, ["model.layers.1"], ["after", "input"])


@pytest.mark.parametrize(("hook", "where", "kind"), CASES)
def test_a_hook_that_looks_at_the_place_in_a_call_is_refused(hook, where, kind):
    model = build("llama")
    generator = SpeculativeGenerator(model, "lookup") if kind == "after" else None
    module, hook = model.get_submodule(where), PLACES[hook]
    if kind == "input":
        module.register_forward_pre_hook(before_the_layer(hook))
    else:
        module.register_forward_hook(hook)
    found = is_equal_or_refused(model, generator)
    assert "depends on how a text is cut into calls" in found
    assert where in found
    assert "see docs/interventions.md" in found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *diagonal(["llama", "qwen3_moe"], [torch.bfloat16, torch.float16]),
        *diagonal(["qwen3_next", "deepseek_v3"], [torch.bfloat16, torch.float16], is_quick=False),
    ],
)
def test_such_a_hook_is_seen_in_half_precision_and_beside_experts(name, dtype):
    model = build(name, dtype=dtype)
    SpeculativeGenerator(model, None)
    model.model.layers[1].register_forward_hook(
        lambda module, args, out: the_last_token(module, args, out).to(dtype)
    )
    with refused("a hook or replaced forward of model.layers.1 has"):
        SpeculativeGenerator(model, None)


@pytest.mark.parametrize(
    ("where", "hook", "kind"),
    [
        *diagonal(WHERE[:2], SOUND, ["before"]),
        *diagonal(WHERE[2:3], SOUND, ["after"]),
        *diagonal(WHERE[3:], SOUND, ["after"], is_quick=False),
    ],
)
def test_a_hook_that_acts_alike_on_every_position_is_run(hook, where, kind):
    model = build("llama")
    generator = SpeculativeGenerator(model, "lookup") if kind == "after" else None
    plain = hf_text(model, torch.arange(1, 10)[None])
    model.get_submodule(where).register_forward_hook(SOUND[hook])
    assert hf_text(model, torch.arange(1, 10)[None]) != plain
    assert is_equal_or_refused(model, generator) == "equal"


def test_a_hook_for_all_modules_is_seen():
    model = build("llama")
    generator = SpeculativeGenerator(model, "lookup")

    def hook(module, args, out):
        if isinstance(module, modeling_llama.LlamaDecoderLayer):
            return the_last_token(module, args, out)

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        assert "is cut into calls" in is_equal_or_refused(model, generator)
    finally:
        handle.remove()
    assert is_equal_or_refused(model, generator) == "equal"


def test_a_model_that_sees_what_follows_is_refused():
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    assert "is cut into calls" in is_equal_or_refused(model)


def sharpened(module, query, key, value, mask, **options):
    scores = query @ modeling_llama.repeat_kv(key, query.shape[1] // key.shape[1]).mT
    scores = 1.5 * scores * options["scaling"]
    if mask is None:
        count, length = scores.shape[-2:]
        mask = torch.full((count, length), -torch.inf).triu(length - count + 1)
    scores = scores + mask
    values = modeling_llama.repeat_kv(value, query.shape[1] // value.shape[1])
    return (scores.softmax(dim=-1) @ values).transpose(1, 2).contiguous(), None


def without_a_head(module, query, key, value, mask, **options):
    out, weights = sharpened(module, query, key, value, mask, **options)
    out = out.clone()
    out[:, :, 1] = 0
    return out, weights


def without_the_first_key(module, query, key, value, mask, **options):
    key = key.clone()
    key[:, :, 0] = 0
    return sharpened(module, query, key, value, mask, **options)


def by_its_own_mask(module, query, key, value, mask, **options):
    return sharpened(module, query, key, value, None, **options)


def only_the_newest_keys(module, query, key, value, mask, **options):
    return sharpened(module, query, key[:, :, -3:], value[:, :, -3:], None, **options)


FUNCTIONS = [sharpened, without_a_head, without_the_first_key]


@pytest.fixture
def register(monkeypatch):
    """`AttentionInterface.register` until the end of a test."""
    mapping = dict(AttentionInterface._global_mapping)
    monkeypatch.setattr(AttentionInterface, "_global_mapping", mapping)
    return AttentionInterface.register


@pytest.mark.parametrize(
    ("when", "function"),
    diagonal(["before", "after", "in the place of eager", "in the place of sdpa"], FUNCTIONS),
)
def test_an_attention_function_of_the_users_own_is_run_as_it_is(
    function, when, register, monkeypatch
):
    model = build("llama")
    plain = hf_text(model, torch.arange(1, 10)[None])
    generator = SpeculativeGenerator(model, "lookup") if when == "after" else None
    if when == "in the place of eager":
        model.set_attn_implementation("eager")
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", function)
    else:
        name = "sdpa" if when == "in the place of sdpa" else "mine"
        register(name, function)
        model.set_attn_implementation(name)
    assert hf_text(model, torch.arange(1, 10)[None]) != plain
    assert is_equal_or_refused(model, generator) == "equal"


@pytest.mark.parametrize("function", [by_its_own_mask, only_the_newest_keys])
def test_one_that_takes_no_mask_is_refused_by_name(function, register):
    register("mine", function)
    model = build("llama")
    model.set_attn_implementation("mine")
    found = is_equal_or_refused(model)
    names = f"{function.__name__} is none of transformers'", "is cut into calls"
    assert any(name in found for name in names)


def test_one_beside_sliding_windows_is_refused_by_name(register):
    register("mine", sharpened)
    model = build("gemma3")
    model.set_attn_implementation("mine")
    found = is_equal_or_refused(model)
    assert "is none of transformers'" in found or "is cut into calls" in found


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def another_class(model):
    class Attention(modeling_llama.LlamaAttention):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(2 * hidden_states, *args, **kwargs)

    model.model.layers[0].self_attn.__class__ = Attention


def a_forward_that_looks_at_the_place(model):
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: the_last_token(layer, args, forward(*args, **kwargs))


EDITS = {
    "parametrised": lambda model: parametrize.register_parametrization(
        model.model.layers[1].mlp.down_proj, "weight", Doubled()
    ),
    "sharper": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 1.4),
    "another_activation": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.Tanh()),
    "another_class": another_class,
    "a_tensor_among_attributes": lambda model: setattr(model.model.layers[1], "steer", VECTOR),
    "a_forward_that_looks_at_the_place": a_forward_that_looks_at_the_place,
}


@pytest.mark.parametrize(
    ("edit", "when"),
    [
        *diagonal([*EDITS][::2], ["after", "before"]),
        *diagonal([*EDITS][1::2], ["before", "after"], is_quick=False),
    ],
)
def test_an_edit_of_a_model_is_followed_or_refused(edit, when):
    model = build("llama")
    layer = model.model.layers[1]
    layer.steer = torch.zeros(32)
    layer.register_forward_hook(lambda module, args, out: out + module.steer)
    generator = SpeculativeGenerator(model, "lookup") if when == "after" else None
    EDITS[edit](model)
    found = is_equal_or_refused(model, generator)
    if edit == "a_forward_that_looks_at_the_place":
        assert "is cut into calls" in found
    elif edit in ("parametrised", "another_activation") and when == "after":
        assert "call generator.refresh()" in found
    else:
        assert found == "equal"


def test_a_trial_leaves_what_a_model_notes_down_as_it_was():
    model = build("llama")
    layer = model.model.layers[1]
    layer.noted = 0

    def note(module, args, out):
        module.noted, module.new = module.noted + 1, 1

    layer.register_forward_hook(note)
    SpeculativeGenerator(model, None)
    assert layer.noted == 0
    assert not hasattr(layer, "new")


def test_a_window_that_only_hfs_cache_knows_is_refused_in_words():
    """HF's cache of such a model forgets what its forward sees."""
    found = is_equal_or_refused(build("llama", sliding_window=70), length=90)
    assert "Set config.sliding_window = None" in found


def at_a_late_position(module, args, kwargs, out):
    return out + VECTOR if kwargs["position_ids"].max() >= 30 else out


def alone(module, args, out):
    return the_last_token(module, args, out) if len(out) == 1 else out


FROM_SOME_SIZE_ON = {
    "at_many_tokens": where(lambda rows, count: count > 8),
    "at_index_19": at(slice(None), slice(19, 20)),
    "alone": alone,
    "in_batches_of_four": where(lambda rows, count: rows == 4),
    "at_a_late_position": at_a_late_position,
    # The function that is registered is one of torch's.
    "no_grad": torch.no_grad()(alone),
    "inference_mode": torch.inference_mode()(alone),
}


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        *diagonal([*FROM_SOME_SIZE_ON][:5], ["llama", "qwen3_moe", "lfm2"]),
        *itertools.product([*FROM_SOME_SIZE_ON][5:], ["llama"]),
    ],
)
def test_a_hook_that_acts_from_some_size_on_is_refused(name, hook):
    model, has_kwargs = build(name), hook == "at_a_late_position"
    layer = model.model.layers[0]
    layer.register_forward_hook(FROM_SOME_SIZE_ON[hook], with_kwargs=has_kwargs)
    with refused("a hook or replaced forward of model.layers.0 has"):
        SpeculativeGenerator(model, None)


def test_a_hook_that_writes_into_the_residual_stream_is_run():
    model = build("llama")

    def write(module, args, out):
        args[0].add_(VECTOR)

    model.model.layers[1].input_layernorm.register_forward_hook(write)
    assert is_equal_or_refused(model) == "equal"


def windowed(*args, mask_function=None, **options):
    def within(row, head, query, key):
        return mask_function(row, head, query, key) & (query - key < 100)

    return masking_utils.sdpa_mask(*args, mask_function=within, **options)


def make_windowed(*args, **options):
    def near(row, head, query, key):
        return query - key < 100

    return masking_utils.create_causal_mask(*args, **options, and_mask_function=near)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["registered", "in the place of HF's", "called"])
def test_masks_of_somebody_elses_are_refused_by_name(way, when, monkeypatch, register):
    model = build("llama", max_position_embeddings=512)
    generator = SpeculativeGenerator(model, "lookup") if when == "after" else None
    known = dict(AttentionMaskInterface._global_mapping)
    monkeypatch.setattr(AttentionMaskInterface, "_global_mapping", known)
    if way == "called":
        monkeypatch.setattr(modeling_llama, "create_causal_mask", make_windowed)
    elif way == "registered":
        AttentionMaskInterface.register("mine", windowed)
        register("mine", sdpa_attention_forward)
        model.set_attn_implementation("mine")
    else:
        AttentionMaskInterface.register("sdpa", windowed)
    found = is_equal_or_refused(model, generator, length=150)
    assert "its masks are made by test_how_a_text_is_cut." in found


def moved_on(model, function):
    """A method that HF's `generate` calls before each forward, with other ids."""

    def prepare(*args, **kwargs):
        inputs = function(*args, **kwargs)
        inputs["input_ids"] = (inputs["input_ids"] + 1) % VOCAB
        return inputs

    model.prepare_inputs_for_generation = prepare


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_generate_itself_does_otherwise_is_refused(when):
    model = build("llama")
    generator = SpeculativeGenerator(model, "lookup") if when == "after" else None
    moved_on(model, model.prepare_inputs_for_generation)
    with refused("its own `generate` has logits that differ"):
        (generator or SpeculativeGenerator(model, None)).generate(torch.tensor([[1, 2, 3]]))


def test_a_sampling_function_of_the_models_own_is_refused():
    class Own(transformers.LlamaForCausalLM):
        def _sample(self, *args, **kwargs):
            return super()._sample(*args, **kwargs)

    with refused("Own has a _sample of its own"):
        SpeculativeGenerator(Own(build("llama").config).eval(), None)


def has_noticed(model, generator, change, **options) -> str:
    """What comes of a call before and one after a change of code that runs in a model."""
    assert is_equal_or_refused(model, generator, **options) == "equal"
    change()
    return is_equal_or_refused(model, generator, **options)


class Steering:
    """A hook with a strength, at the last position or at all."""

    def __init__(self, hook, strength: float = 0.0):
        self.hook, self.strength = hook, strength

    def __call__(self, module, args, out):
        return out + self.strength * (self.hook(module, args, out) - out)


@pytest.mark.parametrize(
    ("hook", "drafter", "graphs"),
    [
        *diagonal(["the_last_token", "every_position"], [None, "lookup"], [False, True]),
        *diagonal(["alone", "calls_of_one_token"], [None, "lookup"], [True, False]),
    ],
)
def test_a_hook_that_is_switched_on_later_is_seen(hook, drafter, graphs):
    hooks = {**PLACES, **SOUND, "alone": alone}
    model, steering = build("llama"), Steering(hooks[hook])
    model.model.layers[1].register_forward_hook(steering)
    generator = SpeculativeGenerator(model, drafter, graphs=graphs)
    found = has_noticed(model, generator, lambda: vars(steering).update(strength=1.0))
    assert found == "equal" if hook in SOUND else "is cut into calls" in found


class Scaled:
    """Stands in the place of a forward, with a number and a dictionary beside it."""

    def __init__(self, forward):
        self.forward, self.scale, self.held = forward, 1.0, {"forward": forward, "scale": 1.0}

    def __call__(self, *args, **kwargs):
        return self.scale * self.held["scale"] * self.forward(*args, **kwargs)


def by_a_partial(mlp):
    forward = mlp.forward
    mlp.forward = partial(lambda x, held: held["scale"] * forward(x), held={"scale": 1.0})
    return lambda: mlp.forward.keywords["held"].update(scale=3.0)


def by_a_default(mlp):
    held = {"forward": mlp.forward, "scale": 1.0}
    mlp.forward = lambda x, held=held: held["scale"] * held["forward"](x)
    return lambda: held.update(scale=3.0)


def by_code(mlp):
    hook, tripled = (lambda module, args, out: out), (lambda module, args, out: 3 * out)
    mlp.register_forward_hook(hook)
    return lambda: setattr(hook, "__code__", tripled.__code__)


def under_an_id(mlp):
    handle = mlp.register_forward_hook(lambda module, args, out: out)
    return lambda: mlp._forward_hooks.update({handle.id: lambda module, args, out: 3 * out})


def by_an_object(change):
    def edit(mlp):
        mlp.forward = Scaled(mlp.forward)
        return lambda: change(mlp.forward)

    return edit


HELD = {
    "by_an_object": by_an_object(lambda scaled: setattr(scaled, "scale", 3.0)),
    "by_a_dictionary_in_an_object": by_an_object(lambda scaled: scaled.held.update(scale=3.0)),
    "by_a_partial": by_a_partial,
    "by_a_default": by_a_default,
    "by_code": by_code,
    "under_an_id": under_an_id,
}


@pytest.mark.parametrize(
    ("edit", "graphs"),
    diagonal([*HELD][:3], [False, True]) + diagonal([*HELD][3:], [False, True], is_quick=False),
)
def test_what_is_changed_inside_of_somebodys_code_is_followed(edit, graphs):
    model = build("llama")
    change = HELD[edit](model.model.layers[1].mlp)
    generator = SpeculativeGenerator(model, "lookup", graphs=graphs)
    assert has_noticed(model, generator, change) == "equal"


SOFTMAX, NORM = torch.nn.functional.softmax, modeling_llama.LlamaRMSNorm.forward


def at_the_last(module, x):
    return the_last_token(module, (), NORM(module, x))


def test_functions_that_are_looked_up_by_name_are_those_of_hf(monkeypatch):
    model = build("llama")
    model.set_attn_implementation("eager")
    generator = SpeculativeGenerator(model, "lookup")
    plain = hf_text(model, torch.arange(1, 10)[None])
    half = lambda *args, **options: SOFTMAX(*args, **options) / 2  # noqa: E731
    change = partial(monkeypatch.setattr, torch.nn.functional, "softmax", half)
    assert has_noticed(model, generator, change) == "equal"
    assert hf_text(model, torch.arange(1, 10)[None]) != plain
    assert is_equal_or_refused(model) == "equal"


def test_a_method_of_a_class_is_seen_where_it_is_replaced(monkeypatch):
    model = build("llama")
    generator = SpeculativeGenerator(model, "lookup")
    change = partial(monkeypatch.setattr, modeling_llama.LlamaRMSNorm, "forward", at_the_last)
    assert "is cut into calls" in has_noticed(model, generator, change)


@pytest.mark.parametrize("count", [100, 400])
def test_a_hook_that_acts_from_many_tokens_on_is_seen_before_a_text_gets_so_long(count):
    model = build("llama", max_position_embeddings=1024)
    model.model.layers[1].register_forward_hook(at(slice(None), slice(count, None)))
    found = is_equal_or_refused(model, length=count + 20)
    assert "is cut into calls" in found


def test_a_hook_that_acts_where_rows_are_padded_is_refused():
    model, seen = build("llama"), {}

    def note(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        seen["padding"] = mask is not None and bool((mask == 0).any())

    model.register_forward_pre_hook(note, with_kwargs=True)
    model.model.layers[1].register_forward_hook(
        lambda module, args, out: out + VECTOR if seen["padding"] else out
    )
    assert "behind padding a text has logits that differ" in is_equal_or_refused(model)


def test_a_forward_may_read_the_id_of_padding():
    class Blind(modeling_llama.LlamaModel):
        def forward(self, input_ids=None, **kwargs):
            seen = (input_ids != self.config.pad_token_id)[..., None]
            kwargs["inputs_embeds"] = self.embed_tokens(input_ids) * seen
            return super().forward(**kwargs)

    model = build("llama")
    model.config.pad_token_id = 6
    model.model.__class__ = Blind
    assert is_equal_or_refused(model) == "equal"  # the prompt holds the id


def test_a_hook_between_two_steps_is_run_or_refused_where_steps_are_captured():
    model, ids = build("llama"), torch.tensor([[5, 6, 7]])
    generator = SpeculativeGenerator(model, "lookup", graphs=True)
    generation = generator.start(ids, max_new_tokens=8)
    handle = model.model.layers[1].register_forward_hook(every_position)
    with refused("captured without them; start another one"):
        generator.step(generation)
    generation = generator.start(ids, max_new_tokens=8)
    generator.step(generation)
    handle.remove()
    with refused("captured without them; start another one"):
        generator.step(generation)


@pytest.mark.parametrize("hook", [every_position, the_last_token])
def test_a_hook_between_two_eager_steps_is_held_against_hf(hook):
    model, ids = build("llama"), torch.tensor([[5, 6, 7]])
    generator = SpeculativeGenerator(model, None)
    generation = generator.start(ids, max_new_tokens=8)
    model.model.layers[1].register_forward_hook(hook)
    if hook is the_last_token:
        for _ in range(2):
            with refused("is cut into calls"):
                generator.step(generation)
        return
    token = int(generator.step(generation).fetch().read()[0].new_tokens[0])
    cache = transformers.DynamicCache(config=model.config)
    hooks, model.model.layers[1]._forward_hooks = model.model.layers[1]._forward_hooks, {}
    model(ids[:, :2], past_key_values=cache)  # the prompt was read without the hook
    model.model.layers[1]._forward_hooks = hooks
    assert token == int(model(ids[:, 2:], past_key_values=cache).logits[0, -1].argmax())


@pytest.mark.parametrize("limit", [4, 5])
def test_a_model_of_few_positions_is_decoded(limit):
    model = build("llama", max_position_embeddings=limit)
    generated = SpeculativeGenerator(model, None).generate(torch.tensor([[5]]), max_new_tokens=3)
    assert generated.sequences[0].tolist() == hf_text(model, torch.tensor([[5]]), 3)


def test_what_dynamo_leaves_in_a_modelling_file_is_nobody_s_own_code(monkeypatch):
    """Also with a backend of one's own, whose functions are installed there."""
    model = build("llama")
    expected = code_of([*model.modules()])
    torch.compile(type(model.model.norm).forward, backend=lambda graph, _: lambda *x: graph(*x))(
        model.model.norm, torch.ones(1, 1, model.config.hidden_size)
    )
    file = vars(sys.modules[type(model).__module__])
    assert any(name.startswith("__compiled_fn") for name in file)
    assert not has_own_code(model)
    assert len(code_of([*model.modules()])) == len(expected)


SIZES = {
    "the window of a step": (lambda rows, count: count == 6, (9, 7), 5),
    "HF's prompt": (lambda rows, count: count == 23, (23, 7), 2),
    "our prompt": (lambda rows, count: count == 22, (23, 7), 2),
    "rows": (lambda rows, count: rows == 6, (9,) * 6, 2),
    "rows that are left": (lambda rows, count: rows == 6, (9,) * 7, 2),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_hook_that_looks_at_a_size_of_a_call_is_refused_when_the_call_comes(name):
    condition, lengths, num_draft_tokens = SIZES[name]
    model = build("llama")
    model.model.layers[1].register_forward_hook(where(condition))
    generator = SpeculativeGenerator(model, PromptLookupDrafter(num_draft_tokens))
    options = {"max_new_tokens": 9, "eos_token_id": None, "pad_token_id": 0}
    with refused("is cut into calls .. model.layers.1 has to act alike"):
        generator.generate(*ragged_prompts(VOCAB, *lengths), **options)


def test_a_hook_that_never_meets_its_size_is_run():
    model = build("llama")
    model.model.layers[1].register_forward_hook(where(lambda rows, count: count == 21))
    assert is_equal_or_refused(model, SpeculativeGenerator(model, "lookup")) == "equal"


def test_of_this_library_the_decoder_of_an_encoder_decoder_alone_is_trusted():
    """A function of any other file of it may act on places of a call, as anybody's may."""
    assert not has_own_code(CausalDecoder(build_whole("bart")))
    model = build("llama")
    handle = model.lm_head.register_forward_hook(name_of)
    assert has_own_code(model)
    handle.remove()
    assert not has_own_code(model)
