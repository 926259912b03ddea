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
from drafting import WrongDrafter, perturbed
from refusals import refused
from target_laws import RaggedBatch, check_found, without_dense_masks
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import ModelDrafter, SelfDrafter, SpeculativeGenerator, Target, Tree
from specdec.slots.attention import sees
from specdec.slots.cache import SlotCache
from specdec.targets.attention import slot_attention
from specdec.targets.edits import biases, own_attention
from specdec.targets.edits.heads import edit as edit_heads
from specdec.targets.trial.probe import HFMask
from specdec.targets.view import private_view

WINDOW = 8
BATCH = RaggedBatch(VOCAB - 1, (1, 9, 17, 24), 24, num_ids=9)


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
    result = BATCH.check_greedy(model, DRAFTERS[kind](model), chunk)
    if kind in RATES:
        assert result.stats.acceptance_rate == RATES[kind]


@pytest.mark.parametrize("name", first(FAMILIES, ["bloom", "falcon", "gemma3n_text"]))
def test_rows_may_leave(name, monkeypatch):
    model = model_of(name)
    BATCH.check_rows_leave(model, DRAFTERS[fitting(name, "tree")](model), monkeypatch)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize(
    "name", first([n for n in FAMILIES if n not in WAITING], ["gpt_neo", "japanese", "doge"])
)
def test_captured_steps_are_the_eager_ones(name, device):
    model, kind = copy.deepcopy(model_of(name)).to(device), fitting(name, "tree")
    check_captured(model, DRAFTERS[kind](model), BATCH.ids, BATCH.mask, **BATCH.options)


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


def local_mask_of(size):
    def mask(module):
        is_local = module.attention_type == "local"
        return HFMask(size, lambda row, head, q, k: sees(q, k, size)) if is_local else None

    return mask


@pytest.mark.parametrize("size", [WINDOW - 1, WINDOW + 1])
def test_the_self_test_finds_a_wrong_window(size, monkeypatch):
    without_dense_masks(monkeypatch)
    monkeypatch.setattr(own_attention, "local_mask", local_mask_of(size))
    check_found(random_model(gpt_neo), monkeypatch, r"h\.1\.attn\.attention differs from its plain")


@pytest.mark.parametrize("window", [256, 400])
def test_a_buffer_that_is_no_window_is_seen(window, monkeypatch):
    """Of a window that the texts of the trial do not exceed: one entry of the buffer."""
    models = [random_model(gpt_neo, window=window, num_positions=512) for _ in range(2)]
    Target(models[0])
    buffer = models[1].transformer.h[3].attn.attention.bias[0, 0]
    assert buffer[window].nonzero()[0] == 1
    buffer[window, 0] = True
    without_dense_masks(monkeypatch)
    with pytest.raises(ValueError, match="layer 3 attends by a mask that is neither"):
        Target(models[1])


def with_larger_scores(*args, scaling, **options):
    return slot_attention(*args, scaling=scaling * 1.01, **options)


@pytest.mark.parametrize("name", ["gpt_neo", "japanese"])
def test_the_self_test_finds_wrong_scores(name, monkeypatch):
    without_dense_masks(monkeypatch)
    functions = {**own_attention.FUNCTIONS, own_attention.ATTENTION: with_larger_scores}
    monkeypatch.setattr(own_attention, "FUNCTIONS", functions)
    check_found(random_model(FAMILIES[name]), monkeypatch)


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


BIASES = {
    "none": torch.zeros_like,
    "one_slot_apart": lambda found: found.roll(1, dims=-1),
    "of_another_head": lambda found: found.roll(1, dims=0),
}


@pytest.mark.parametrize("fault", BIASES)
@pytest.mark.parametrize("name", ["bloom", "falcon", "falcon, eager"])
def test_the_self_test_finds_wrong_biases(name, fault, monkeypatch):
    over_slots = biases._over_slots

    def faulty(build, mask, *args, **options):
        found = over_slots(build, mask, *args, **options)
        return BIASES[fault](found) if mask.dim() == 4 else found

    monkeypatch.setattr(biases, "_over_slots", faulty)
    check_found(random_model(FAMILIES[name]), monkeypatch)


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
    monkeypatch.setattr(SlotCache, "update", fault)
    check_found(random_model(FAMILIES[name]), monkeypatch)


@torch.no_grad()
def test_a_feature_of_streams_is_the_one_that_attention_reads():
    model = model_of("gemma3n_text")
    ids = BATCH.row(3)
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
    BATCH.check_greedy(model, SelfDrafter(model, 3, layers=2))


def doge(**options):
    config = copy.deepcopy(model_of("doge").config)
    for name, value in options.items():
        setattr(config, name, value)
    return random_model(lambda: transformers.DogeForCausalLM(config))


def test_doge_is_decoded_while_all_keys_are_read():
    """In its first layer equal tokens have equal values, and `topk` takes any of them."""
    generator = SpeculativeGenerator(doge(keep_window_size=48), "lookup")
    found = generator.generate(BATCH.ids, BATCH.mask, **BATCH.options)
    assert found.new_tokens.tolist() == BATCH.texts(model_of("doge"))
    with refused("24 tokens and 25 new tokens make 49, .. has 48 positions"):
        generator.generate(BATCH.ids, BATCH.mask, **BATCH.options | {"max_new_tokens": 25})
    with refused("layers choose keys by their values"):
        Target(doge(sliding_window=12))
