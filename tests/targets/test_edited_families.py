"""Families that run over slots by an edit of their views, or whose layers are no one list: GPT-Neo
and GPT-NeoX Japanese (attention of their own), BLOOM and Falcon (biases by distance), Gemma 3n
(streams), LongCat-Flash (two attentions in a layer), HRM (cycles), Doge (values make masks).

The oracle is HF's `generate` of each row alone.
"""

import copy
from functools import cache, partial

import pytest
import torch
import transformers
from agreement import check_captured
from census.shapes import VOCAB, build
from diagonal import PLACES, diagonal, first
from drafting import WrongDrafter, perturbed, ragged_prompts
from fingerprint import fingerprint
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import ModelDrafter, SelfDrafter, SpeculativeGenerator, Target, Tree
from specdec.graphs import rows as of_rows
from specdec.slots.attention import sees
from specdec.slots.cache import SlotCache
from specdec.targets import discovery
from specdec.targets.attention import slot_attention
from specdec.targets.edits import biases, own_attention
from specdec.targets.edits.heads import edit as edit_heads
from specdec.targets.trial.probe import HFMask
from specdec.targets.view import private_view

WINDOW, NUM_NEW, LENGTHS = 8, 24, (1, 9, 17, 24)
IDS, MASK = ragged_prompts(VOCAB - 1, *LENGTHS)
OPTIONS = {"max_new_tokens": NUM_NEW, "eos_token_id": None, "pad_token_id": 0}


def gpt_neo(window=WINDOW, num_positions=128, **options):
    config = transformers.GPTNeoConfig(
        **{"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 4, "num_heads": 4},
        **{"attention_types": [[["global", "local"], 2]], "window_size": window},
        **{"max_position_embeddings": num_positions, **options},
    )
    return transformers.GPTNeoForCausalLM(config)


def japanese():
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3}
    config = transformers.GPTNeoXJapaneseConfig(**sizes, num_attention_heads=4)
    return transformers.GPTNeoXJapaneseForCausalLM(config)


def bloom():
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=48, n_layer=3, n_head=3)
    return transformers.BloomForCausalLM(config)


def falcon(implementation="sdpa"):
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3}
    kind = {"alibi": True, "attn_implementation": implementation}
    config = transformers.FalconConfig(**sizes, **kind, num_attention_heads=4)
    return transformers.FalconForCausalLM(config)


FAMILIES = {
    "gpt_neo": gpt_neo,
    "japanese": japanese,
    "bloom": bloom,
    "falcon": falcon,
    "falcon, eager": lambda: falcon("eager"),
    **{
        name: partial(build, name, window=WINDOW)
        for name in ("gemma3n_text", "longcat_flash", "hrm_text", "doge")
        if name in transformers.CONFIG_MAPPING
    },
}
CHAINS = {"bloom", "falcon", "falcon, eager"}
"""Their biases are by slots, and nodes of one depth have several."""


WAITING = {"longcat_flash"}
"""HF's loop over its experts waits for the device, so that its steps are not captured."""


def random_model(make, **options):
    torch.manual_seed(0)
    model = make(**options).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    return model


@cache
def model_of(name):
    return random_model(FAMILIES[name])


@cache
def texts(name):
    """HF's continuation of each row."""
    found = []
    for row, length in enumerate(LENGTHS):
        alone = IDS[row : row + 1, -length:]
        mask = torch.ones_like(alone)
        options = {"attention_mask": mask, "do_sample": False, **OPTIONS}
        found.append(model_of(name).generate(alone, **options)[0, length:].tolist())
    assert len({token for text in found for token in text}) > 8, name
    return found


DRAFTERS = {
    "good": lambda model: ModelDrafter(perturbed(model), 4),
    "tree": lambda model: ModelDrafter(perturbed(model), tree=Tree(nodes=9, depth=4, top_k=3)),
    "wrong": lambda model: WrongDrafter(model, 3),
    "itself": lambda model: ModelDrafter(model, 4),
    "none": lambda model: None,
}
RATES = {"wrong": 0, "itself": 1}


def fitting(name, kind):
    return "good" if kind == "tree" and name in CHAINS else kind


AXES = DRAFTERS, (4, 512, 1)
LONG = {"falcon, eager", "longcat_flash", "hrm_text"} & {*FAMILIES}
CASES = diagonal([n for n in FAMILIES if n not in LONG], *AXES)
CASES += diagonal(sorted(LONG), *AXES, is_quick=False)


@pytest.mark.parametrize(("name", "kind", "chunk"), CASES)
def test_greedy_text_is_that_of_hf(name, kind, chunk):
    model, kind = model_of(name), fitting(name, kind)
    before = fingerprint(model)
    generator = SpeculativeGenerator(model, DRAFTERS[kind](model), prefill_chunk_size=chunk)
    result = generator.generate(IDS, MASK, **OPTIONS)
    assert result.new_tokens.tolist() == texts(name)
    if kind in RATES:
        assert result.stats.acceptance_rate == RATES[kind]
    row, length = 1, LENGTHS[1]
    alone = generator.generate(IDS[row : row + 1, -length:], **OPTIONS)
    assert alone.new_tokens.tolist() == [texts(name)[row]]
    assert fingerprint(model) == before


@pytest.mark.parametrize("name", first(FAMILIES, ["bloom", "falcon", "gemma3n_text"]))
def test_rows_may_leave(name, monkeypatch):
    """Each row ends at a token of its own, and what HF writes behind it does not matter."""
    whole = texts(name)
    ends = [whole[0][2], whole[2][5]]
    cut = [[*text, *ends][: min(map([*text, *ends].index, ends)) + 1][:NUM_NEW] for text in whole]
    assert len(set(map(len, cut))) > 1
    left, keep_rows = [], of_rows.keep_rows
    monkeypatch.setattr(of_rows, "keep_rows", lambda *a: left.append(a[1]) or keep_rows(*a))
    model = model_of(name)
    drafter = DRAFTERS[fitting(name, "tree")](model)
    generator = SpeculativeGenerator(model, drafter, steps_ahead=0)
    result = generator.generate(IDS, MASK, **OPTIONS | {"eos_token_id": ends})
    rows = zip(result.new_tokens.tolist(), cut, strict=True)
    assert [row[: len(text)] for row, text in rows] == cut
    assert left


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize(
    "name", first([n for n in FAMILIES if n not in WAITING], ["gpt_neo", "japanese", "doge"])
)
def test_captured_steps_are_the_eager_ones(name, device):
    model, kind = copy.deepcopy(model_of(name)).to(device), fitting(name, "tree")
    check_captured(model, DRAFTERS[kind](model), IDS, MASK, **OPTIONS)


@pytest.mark.parametrize("name", FAMILIES)
def test_who_reads_trees(name):
    target = Target(model_of(name))
    if name not in CHAINS:
        target.check_trees()
    else:
        with pytest.raises(ValueError, match="cannot read the window of a tree"):
            target.check_trees()


@pytest.mark.parametrize("name", FAMILIES)
def test_models_in_half_precision_are_taken(name):
    Target(copy.deepcopy(model_of(name)).to(torch.bfloat16))


# Faults. HF's own attention under a dense mask has none, and is not tried.


def refused(model):
    raise ValueError("not in this test")


def local_mask_of(size):
    def mask(module):
        is_local = module.attention_type == "local"
        return HFMask(size, lambda row, head, q, k: sees(q, k, size)) if is_local else None

    return mask


@pytest.mark.parametrize("size", [WINDOW - 1, WINDOW + 1])
def test_the_self_test_finds_a_wrong_window(size, monkeypatch):
    monkeypatch.setattr(discovery, "_with_dense_mask", refused)
    monkeypatch.setattr(own_attention, "local_mask", local_mask_of(size))
    with pytest.raises(ValueError, match=r"h\.1\.attn\.attention differs from its plain forward"):
        Target(random_model(gpt_neo))
    monkeypatch.undo()
    Target(random_model(gpt_neo))


@pytest.mark.parametrize("window", [256, 400])
def test_a_buffer_that_is_no_window_is_seen(window, monkeypatch):
    """Of a window that the texts of the trial do not exceed: one entry of the buffer."""
    models = [random_model(gpt_neo, window=window, num_positions=512) for _ in range(2)]
    Target(models[0])
    buffer = models[1].transformer.h[3].attn.attention.bias[0, 0]
    assert buffer[window].nonzero()[0] == 1
    buffer[window, 0] = True
    monkeypatch.setattr(discovery, "_with_dense_mask", refused)
    with pytest.raises(ValueError, match="layer 3 attends by a mask that is neither"):
        Target(models[1])


def with_scaling(factor):
    def attend(*args, scaling, **options):
        return slot_attention(*args, scaling=scaling * factor, **options)

    return attend


@pytest.mark.parametrize("name", ["gpt_neo", "japanese"])
def test_the_self_test_finds_wrong_scores(name, monkeypatch):
    monkeypatch.setattr(discovery, "_with_dense_mask", refused)
    functions = {**own_attention.FUNCTIONS, own_attention.ATTENTION: with_scaling(1.01)}
    monkeypatch.setattr(own_attention, "FUNCTIONS", functions)
    with pytest.raises(ValueError, match="differs from its plain forward"):
        Target(random_model(FAMILIES[name]))


FALCONS = {
    "7B": {},
    "RW": {"multi_query": False},
    "40B": {"new_decoder_architecture": True, "num_kv_heads": 2},
}


@pytest.mark.parametrize("options", FALCONS.values(), ids=FALCONS)
def test_falcons_heads_are_those_of_hf_and_nothing_is_copied_to_the_device(options):
    config = transformers.FalconConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, **options
    )
    model = random_model(lambda: transformers.FalconForCausalLM(config))
    attention = model.transformer.h[0].self_attention
    product = attention.query_key_value(torch.randn(2, 5, 32))
    view = private_view(model)
    edit_heads(view)
    with Operations() as operations:
        found = view.transformer.h[0].self_attention._split_heads(product)
    for ours, theirs in zip(found, attention._split_heads(product), strict=True):
        assert ours.equal(theirs)
    assert not operations.names & {"lift_fresh", "index", "_to_copy"}


class Operations(TorchDispatchMode):
    """The names of all that runs."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def none(found):
    return torch.zeros_like(found)


def one_slot_apart(found):
    return found.roll(1, dims=-1)


def of_another_head(found):
    return found.roll(1, dims=0)


@pytest.mark.parametrize("fault", [none, one_slot_apart, of_another_head])
@pytest.mark.parametrize("name", ["bloom", "falcon", "falcon, eager"])
def test_the_self_test_finds_wrong_biases(name, fault, monkeypatch):
    over_slots = biases._over_slots

    def faulty(build, mask, *args, **options):
        found = over_slots(build, mask, *args, **options)
        return fault(found) if mask.dim() == 4 else found

    monkeypatch.setattr(biases, "_over_slots", faulty)
    with pytest.raises(ValueError, match="differs from its plain forward"):
        Target(random_model(FAMILIES[name]))
    monkeypatch.undo()
    Target(random_model(FAMILIES[name]))


def in_the_layer(index):
    """Keys and values of two attentions, or of two cycles, in one layer of the cache."""

    def update(cache, keys, values, layer, *args, **kwargs):
        return UPDATE(cache, keys, values, index(layer), *args, **kwargs)

    return update


def of_the_other_row(cache, keys, values, layer, *args, **kwargs):
    keys, values = UPDATE(cache, keys, values, layer, *args, **kwargs)
    return (keys.flip(0), values.flip(0)) if layer == 1 else (keys, values)


def one_slot_late(cache, keys, values, layer, *args, **kwargs):
    keys, values = UPDATE(cache, keys, values, layer, *args, **kwargs)
    return (keys.roll(1, dims=2), values) if layer == 1 else (keys, values)


UPDATE = SlotCache.update
STORED_WRONG = {
    "longcat_flash": [in_the_layer(lambda layer: layer // 2 * 2), of_the_other_row],
    "hrm_text": [in_the_layer(lambda layer: layer % 2), of_the_other_row],
    "gemma3n_text": [one_slot_late, of_the_other_row],
    "doge": [one_slot_late, of_the_other_row],
}


@pytest.mark.parametrize(
    ("name", "fault"),
    [(name, fault) for name in STORED_WRONG if name in FAMILIES for fault in STORED_WRONG[name]],
)
def test_the_self_test_finds_what_is_stored_wrong(name, fault, monkeypatch):
    model = random_model(FAMILIES[name])
    monkeypatch.setattr(SlotCache, "update", fault)
    with pytest.raises(ValueError, match="differs from its plain forward"):
        Target(model)
    monkeypatch.undo()
    Target(model)


@torch.no_grad()
def test_a_feature_of_streams_is_the_one_that_attention_reads():
    model = model_of("gemma3n_text")
    ids = IDS[-1:]
    states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    read = model.config.altup_active_idx
    assert states[1].dim() == 4
    target = Target(model, feature_layers=(0, 1, 3))
    cache = target.init_cache(1, 40)
    slots = torch.arange(ids.shape[1])[None]
    _, features = target.forward(ids, cache, slots)
    whole = torch.cat([states[layer][read] for layer in (0, 1, 3)], dim=-1)
    torch.testing.assert_close(features, whole, rtol=0, atol=2e-5)


def test_a_layer_of_two_attentions_is_one_layer():
    model = model_of("longcat_flash")
    assert Target(model).num_layers == len(model.model.layers) == model.config.num_layers
    result = SpeculativeGenerator(model, SelfDrafter(model, 3, layers=2)).generate(
        IDS, MASK, **OPTIONS
    )
    assert result.new_tokens.tolist() == texts("longcat_flash")


def doge(**options):
    config = copy.deepcopy(model_of("doge").config)
    for name, value in options.items():
        setattr(config, name, value)
    return random_model(lambda: transformers.DogeForCausalLM(config))


def test_doge_is_decoded_while_all_keys_are_read():
    """In its first layer equal tokens have equal values, and `topk` takes any of them."""
    generator = SpeculativeGenerator(doge(keep_window_size=48), "lookup")
    assert generator.generate(IDS, MASK, **OPTIONS).new_tokens.tolist() == texts("doge")
    with pytest.raises(
        ValueError, match=r"24 tokens and 25 new tokens make 49, .* has 48 positions"
    ):
        generator.generate(IDS, MASK, **OPTIONS | {"max_new_tokens": 25})


def test_doge_with_a_sliding_window_is_refused():
    with pytest.raises(ValueError, match="layers choose keys by their values"):
        Target(doge(sliding_window=12))
