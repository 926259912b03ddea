"""Layers that read one entry for several tokens, beside the nearest tokens: DeepSeek-V4.

The oracle is HF's `generate` of each row alone, since padding changes what HF writes: its windows
and entries count from the first slot. Indexers have 32 heads here: with few of them scores are
exactly 0 for several entries, and HF's choice among these depends on how many there are.
"""

import copy
from functools import cache
from itertools import product

import pytest
import text_laws
import torch
import transformers
from agreement import check_captured
from diagonal import PLACES, case, first
from drafting import WrongDrafter, perturbed, ragged_prompts
from refusals import refused
from target_laws import RaggedBatch, check_found
from transformers import CONFIG_MAPPING, AttentionInterface, GenerationConfig

from specdec import ModelDrafter, SelfDrafter, SpeculativeGenerator, Target, Tree
from specdec.drafters import Recent
from specdec.slots.cache import SlotCache
from specdec.slots.layout import Compressor
from specdec.targets.edits import compressed
from specdec.targets.edits.compressed import COMPRESSED, LayerSlots, compressed_attention
from specdec.types import Draft, Queries

if "deepseek_v4" not in CONFIG_MAPPING:
    pytest.skip(
        f"transformers {transformers.__version__} has no DeepSeek-V4", allow_module_level=True
    )

VOCAB = 99
LOCAL, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
KINDS = LOCAL, SPARSE, HEAVY, SPARSE
FEW, ALL = 3, 64
"""Entries that are chosen: fewer than the texts have, and more than there are."""
BATCH = RaggedBatch(VOCAB - 1, (1, 9, 40, 70), 20)
RELEASED = RaggedBatch(VOCAB - 1, (1, 120, 128, 260), 20)
"""Texts that end before, at and after the border of an entry of 128 tokens."""


@cache
def model_of(count=FEW, rates=(4, 16), window=8, vocab_size=VOCAB):
    """Random in all of its parts, also in those that HF initialises with zeros."""
    config = CONFIG_MAPPING["deepseek_v4"](
        vocab_size=vocab_size,
        hidden_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=len(KINDS),
        num_attention_heads=4,
        head_dim=16,
        q_lora_rank=16,
        num_experts_per_tok=2,
        n_routed_experts=4,
        max_position_embeddings=2048,
        layer_types=list(KINDS),
        mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe"],
        compress_rates={SPARSE: rates[0], HEAVY: rates[1]},
        sliding_window=window,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=32,
        index_head_dim=16,
        index_topk=count,
        partial_rotary_factor=0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(config).float().eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15, generator=generator)
            if name.endswith(("position_bias", "sinks")):
                parameter.normal_(0.0, 1.0, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                order = torch.rand(len(buffer), 4, generator=generator).argsort(dim=1)
                buffer.copy_(order[:, : buffer.shape[1]])
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3, generator=generator)
    return model


DRAFTERS = {
    "lookup": lambda model: "lookup",
    "good": lambda model: ModelDrafter(perturbed(model, scale=0.02), 4),
    "wrong": lambda model: WrongDrafter(model, 3),
    "itself": lambda model: ModelDrafter(model, 4),
    "none": lambda model: None,
    "two layers": lambda model: SelfDrafter(model, 3, layers=2),
    "other weights": lambda model: SelfDrafter(model, 3, model=perturbed(model, scale=0.02)),
}
RATES = {"wrong": 0, "itself": 1}


QUICK = [("lookup", FEW, 4), ("none", FEW, 512), ("itself", ALL, 4), ("other weights", FEW, 4)]


@pytest.mark.parametrize(
    ("kind", "count", "chunk"),
    [case([*each], each in QUICK) for each in product(DRAFTERS, (FEW, ALL), (4, 1, 512))],
)
def test_greedy_text_is_that_of_hf(kind, count, chunk):
    model = model_of(count)
    result = BATCH.check_greedy(model, DRAFTERS[kind](model), chunk)
    if kind in RATES:
        assert result.stats.acceptance_rate == RATES[kind]
    if kind in ("good", "other weights"):
        assert 0.2 < result.stats.acceptance_rate < 0.95


@pytest.mark.parametrize(
    ("kind", "chunk"), [case([k, c], k == "lookup" and c == 64) for k in DRAFTERS for c in (64, 4)]
)
def test_greedy_text_at_the_rates_and_the_window_of_released_models(kind, chunk):
    model = model_of(8, (4, 128), 128)
    RELEASED.check_greedy(model, DRAFTERS[kind](model), chunk)


def test_what_is_chosen_changes_texts():
    assert BATCH.texts(model_of(FEW)) != BATCH.texts(model_of(ALL))


def test_rows_that_leave_take_their_entries_with_them(monkeypatch):
    BATCH.check_rows_leave(model_of(), DRAFTERS["good"](model_of()), monkeypatch)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("kind", first(["good", "lookup"], ["lookup"]))
def test_captured_steps_are_the_eager_ones(kind, device):
    model = copy.deepcopy(model_of()).to(device)
    if device == "cpu":
        model.set_experts_implementation("batched_mm")  # the default waits there
    check_captured(model, DRAFTERS[kind](model), BATCH.ids, BATCH.mask, **BATCH.options)


# What is in slots.


def verified_logits(target, poisons, read, count=3):
    """Logits of a ragged window, with the cache poisoned between prefill and verification."""
    read = torch.tensor(read)
    tokens = torch.randint(3, VOCAB, (3, 40), generator=torch.Generator().manual_seed(0))
    cache = target.init_cache(3, 48, extra_slots=0)
    target.prefill(cache, tokens[:, : int(read.max())], read, offset=0)
    slots = torch.arange(49)
    for key, buffer in cache.keys.items():
        is_chosen = isinstance(key, Compressor) and key.name == "indexer"
        buffer[slots >= read[:, None]] = poisons[is_chosen]
    root = tokens.gather(1, read[:, None])[:, 0]
    draft = tokens.gather(1, read[:, None] + 1 + torch.arange(count))
    return target.verify(cache, read, root, Draft(draft)).logits


@pytest.mark.parametrize("count", [0, 3, 5])
@torch.no_grad()
def test_garbage_changes_no_logit(count):
    target = Target(model_of())
    clean = verified_logits(target, (0.0, 0.0), (3, 30, 13), count)
    assert bool(clean.isfinite().all())
    for poison in (1e30, float("nan"), float("inf")):
        assert verified_logits(target, (1e30, poison), (3, 30, 13), count).equal(clean)


@torch.no_grad()
def test_entries_of_rejected_tokens_are_made_again():
    """Logits after windows with rejected tokens in them are those of HF's forward of the text."""
    model = model_of()
    target, text = Target(model), ragged_prompts(VOCAB - 1, 48, 48, seed=5)[0]
    expected = model(input_ids=text, use_cache=False).logits
    cache, start = target.init_cache(2, 64), torch.tensor([3, 17])
    target.prefill(cache, text[:, :17], start, offset=0)
    for kept in ((1, 2), (4, 5), (2, 1), (5, 3), (3, 4), (1, 1), (5, 5)):
        window = start[:, None] + torch.arange(5)
        true, kept = text.gather(1, window), torch.tensor(kept)
        read = torch.where(torch.arange(5) < kept[:, None], true, (true + 7) % VOCAB)
        logits = target.verify(cache, start, read[:, 0], Draft(read[:, 1:])).logits
        for row in range(2):
            few = slice(int(start[row]), int(start[row] + kept[row]))
            torch.testing.assert_close(
                logits[row, : kept[row]], expected[row, few], rtol=0, atol=2e-4
            )
        start = start + kept


# Sampled texts.


ENTRIES_OF = compressed.entries_of


@pytest.mark.swept
def test_texts_have_the_targets_distribution(monkeypatch):
    """Chi-square, false-alarm rate 1e-9 per length; texts without entries fail."""
    model, drafter = model_of(2, (2, 4), 2, text_laws.VOCAB), text_laws.tiny(text_laws.DRAFT)
    generator = SpeculativeGenerator(model, ModelDrafter(drafter, 3), prefill_chunk_size=4)
    assert min(text_laws.p_values_of_model(generator, 2000)) > text_laws.ALPHA
    with_entries(never_made)(monkeypatch)
    assert min(text_laws.p_values_of_model(generator, 2000)) < text_laws.ALPHA


# Faults.


def with_entries(change):
    """What is made of entries `[B, M, D]` and the slots of their last tokens `[B, M]`."""

    def plant(patch):
        patch.setattr(compressed, "entries_of", lambda *args: change(*ENTRIES_OF(*args), args))

    return plant


def never_made(entries, ends, args):
    return entries, torch.full_like(ends, args[3])


def but_the_last(entries, ends, args):
    """The last entry of a window stays what it was."""
    last = ends.where(ends < args[3], -1).amax(dim=1, keepdim=True)
    return entries, ends.where(ends != last, args[3])


def of_other_rows(entries, ends, args):
    return entries.flip(0), ends


def one_entry_late(entries, ends, args):
    moved = ends + args[0].compress_rate
    return entries, moved.where(moved < args[3], args[3])


def made_of_half(entries, ends, args):
    """Without the tokens before a window."""
    module, read, slots, padding_slot = args
    order = torch.arange(read.shape[1])
    read = read.masked_fill((order < slots.amin(dim=1, keepdim=True))[..., None], 0.0)
    return ENTRIES_OF(module, read, slots, padding_slot)


def not_overlapping(entries, ends, args):
    module, read, slots, padding_slot = args
    if read.shape[2] == 2 * module.head_dim:
        return entries, ends
    read = read.clone()
    read[..., 2 * module.head_dim : 3 * module.head_dim] = -torch.inf  # gates of the next entry
    return ENTRIES_OF(module, read, slots, padding_slot)


def with_seen(shift):
    """A compressor's bias, by entries: one more is seen, or one less."""

    def plant(patch):
        own = compressed._with_bias

        def faulty(rate, forward, *args, **kwargs):
            entries, bias = own(rate, forward, *args, **kwargs)
            moved = bias.roll(shift, dims=-1)
            moved[..., 0 if shift > 0 else -1] = 0.0 if shift > 0 else -torch.inf
            return entries, moved

        patch.setattr(compressed, "_with_bias", faulty)

    return plant


def all_for_one_token(patch):
    """What HF does for a single token, over its own cache."""

    def faulty(rate, forward, *args, **kwargs):
        entries, bias = forward(*args, **kwargs)
        return entries, 0 * entries[:, :, :, 0][:, :, None] if bias is None else bias

    patch.setattr(compressed, "_with_bias", faulty)


def near_of_other_rows(patch):
    own = LayerSlots.update
    patch.setattr(LayerSlots, "update", lambda *a, **k: tuple(x.flip(0) for x in own(*a, **k)))


def one_token_more(patch):
    own = compressed._near
    patch.setattr(compressed, "_near", lambda window, hidden, size: own(window, hidden, size + 1))


def read_late(patch):
    """What compressors read of a window is seen by the next one alone."""
    own = SlotCache.write

    def faulty(cache, stored, states, slots=None):
        before = cache.keys[stored][:, : cache.window.num_attended, 0].clone()
        out = own(cache, stored, states, slots)
        return before if isinstance(stored, Compressor) and slots is None else out

    patch.setattr(SlotCache, "write", faulty)


def without_sinks(patch):
    def faulty(module, query, *args, s_aux, **options):
        return compressed_attention(module, query, *args, s_aux=s_aux - 100.0, **options)

    patch.setitem(AttentionInterface._global_mapping, COMPRESSED, faulty)


FAULTS = {
    "an entry is never made": with_entries(never_made),
    "a stale entry": with_entries(but_the_last),
    "entries of the other row": with_entries(of_other_rows),
    "an entry one too far": with_entries(one_entry_late),
    "an entry of a window's tokens alone": with_entries(made_of_half),
    "entries that do not overlap": with_entries(not_overlapping),
    "an entry more is seen": with_seen(1),
    "an entry less is seen": with_seen(-1),
    "a single token sees all": all_for_one_token,
    "near tokens of the other row": near_of_other_rows,
    "a near token more": one_token_more,
    "tokens are read late": read_late,
    "no sinks": without_sinks,
}


QUICK_FAULTS = ["an entry is never made", "entries that do not overlap", "an entry less is seen"]
QUICK_FAULTS += ["a single token sees all", "a near token more", "tokens are read late"]


@pytest.mark.parametrize(
    ("fault", "count", "rates", "window"),
    [
        case([fault, *sizes], sizes == (FEW, (4, 16), 8) and fault in QUICK_FAULTS)
        for fault in FAULTS
        for sizes in ((FEW, (4, 16), 8), (512, (4, 128), 128))
    ],
)
def test_the_self_test_finds(fault, count, rates, window, monkeypatch):
    FAULTS[fault](monkeypatch)
    check_found(copy.deepcopy(model_of(count, rates, window)), monkeypatch)


# What is refused.


def test_streams_and_queries_are_no_features():
    target = Target(model_of())
    with refused("several streams of hidden states, so that hidden stat"):
        target.with_features((1,))
    with refused("queries of layer 1 .. read entries"):
        target.with_features((Queries(1),))
    final = target.with_features(("final", Queries(0)))
    cache, text = final.init_cache(1, 32), torch.arange(3, 23)[None]
    found = final.prefill(cache, text, torch.tensor([20]), offset=0)
    assert found.shape == (1, 20, 64 + 64)
    with torch.no_grad():
        expected = target.model.model(input_ids=text, use_cache=False).last_hidden_state
    torch.testing.assert_close(found[..., :64], expected, rtol=0, atol=1e-4)


def over_a_cache(call, **row_inputs):
    target = Target(model_of())
    cache, text = target.init_cache(1, 32), torch.arange(3, 23)[None]
    cache.row_inputs = row_inputs
    target.prefill(cache, text, torch.tensor([9]), offset=0)
    call(target, cache, text)


def verify_a_tree(target, cache, text):
    draft = Draft(text[:, 10:13], parents=torch.tensor([[-1, -1, 0]]))
    target.verify(cache, torch.tensor([9]), text[:, 9], draft)


def choose_among_equal_scores():
    """HF's choice among them depends on how many entries there are, and is none of the text's."""
    model = copy.deepcopy(model_of())
    for layer in model.model.layers:
        if layer.self_attn.layer_type == SPARSE:
            layer.self_attn.compressor.indexer.scorer.weights_proj.weight.data[:] = 0.0
    Target(model)


def draft_a_tree():
    drafter = ModelDrafter(perturbed(text_laws.tiny(0)), tree=Tree(nodes=3, depth=2, top_k=2))
    SpeculativeGenerator(model_of(), drafter)


REFUSED = {
    "window of a tree (compressed layers read it as a cha": lambda: ModelDrafter(
        model_of(), tree=Tree(nodes=9, depth=4, top_k=3)
    ),
    "window of a tree": draft_a_tree,
    "reads chains only": lambda: over_a_cache(verify_a_tree),
    "counts entries from the first token of a text": lambda: over_a_cache(
        None, position_offset=torch.tensor([4])
    ),
    "read entries of several tokens, of which no part": lambda: SelfDrafter(
        model_of(), 3, visible=Recent(6)
    ),
    "can be shown; leave out visible=": lambda: ModelDrafter(model_of(), visible=Recent(6)),
    "cannot be decoded": choose_among_equal_scores,
}


@torch.no_grad()
@pytest.mark.parametrize("words", REFUSED)
def test_what_such_layers_cannot_do_is_refused(words):
    with refused(words):
        REFUSED[words]()
