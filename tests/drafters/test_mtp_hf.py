"""`MTPDrafter` and HF's own multi-token prediction (`use_mtp`) draft the same tokens, whole greedy
generations long, over tiny random targets whose checkpoints hold prediction modules.

HF's is chained and normalised (`semantics="chain"`, `feedback_norm=True`), the training form, and
it repairs stale entries: it crops the caches of all depths by D and feeds D rows more, in a forward
whose length depends on what was accepted. It deviates in three things, none of which changes a
token here. It counts positions from the token, not from the hidden state. It keeps the features of
the whole text. It drafts nothing in the first step, so texts are compared from its second token on.
A fourth deviation is a fault: of a text shorter than D tokens it cannot crop D rows.
"""

import pytest
import torch
import transformers
from diagonal import case
from mtp_checkpoints import SHAPES, random_model, write_mtp_names, write_numbered
from transformers.generation import candidate_generator as candidates

from specdec import SpeculativeGenerator
from specdec.checkpoints import survey_checkpoint
from specdec.checkpoints.mtp import MTP
from specdec.drafters import MTPDrafter

VOCAB, NUM_NEW = 5, 40  # few ids: random modules are often right
# Family, depths and a seed whose generation accepts now few and now many.
CASES = [
    ("DeepseekV3", 1, 1),
    ("DeepseekV3", 2, 2),
    ("DeepseekV3", 4, 2),
    ("Glm4Moe", 2, 3),
    ("Glm4Moe", 3, 2),
    ("Glm4Moe", 4, 1),
]
HAS_MELLUM = hasattr(transformers, "MellumConfig")
if HAS_MELLUM and hasattr(transformers.MellumConfig, "num_mtp_layers"):  # in 5.17 it has none
    CASES.append(("Mellum", 1, 1))


def target_with_modules(folder, family, num_depths, seed):
    if family == "Mellum":  # under Qwen's names, with plain norms and a sliding window
        model = random_model(family, seed=seed, vocab_size=VOCAB)
        layer = type(model.model.layers[0])(model.config.get_mtp_config(), 0)
        write_mtp_names(folder, model, layer, seed=seed)
        return type(model).from_pretrained(folder, dtype=torch.float32).eval()
    model, _ = write_numbered(folder, family, num_depths=num_depths, seed=seed, vocab_size=VOCAB)
    first = SHAPES[family]["num_hidden_layers"]
    # HF names the modules' layers by the numbers of the published models.
    names = [rf"model\.layers\.{first + depth}.*" for depth in range(num_depths)]
    model._keys_to_ignore_on_load_unexpected = names
    return model


def prompt(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (1, length), generator=generator)


def drafted_by_hf(model, ids, monkeypatch):
    """HF's greedy text, and its drafts: length of the text before each, and the tokens."""
    drafts, of_hf = [], candidates.MTPCandidateGenerator.get_candidates

    def spy(self, input_ids, **inputs):
        found = of_hf(self, input_ids, **inputs)
        count = input_ids.shape[1]
        drafts.append((count, found[0][0, count:].tolist()))
        return found

    monkeypatch.setattr(candidates.MTPCandidateGenerator, "get_candidates", spy)
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0, "use_mtp": True}
    text = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return text, drafts[1:]


@pytest.mark.parametrize(
    ("family", "num_depths", "seed", "is_ours"),
    [
        case([*each, is_ours], is_ours == (index % 2 == 0))
        for index, each in enumerate(CASES)
        for is_ours in (False, True)
    ],
)
def test_drafts_are_those_of_hf(tmp_path, monkeypatch, family, num_depths, seed, is_ours):
    model = target_with_modules(tmp_path, family, num_depths, seed)
    if is_ours:  # HF reads a file of the library's
        drafter = MTPDrafter.from_pretrained(tmp_path, model, num_depths)
        tmp_path /= "ours"
        layout = "Qwen" if family == "Mellum" else "DeepSeek"
        drafter.save_pretrained(tmp_path, layout, model)
        ignored = model._keys_to_ignore_on_load_unexpected
        model = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
        model._keys_to_ignore_on_load_unexpected = ignored
    ids = prompt(num_depths, 5 + seed)
    text, theirs = drafted_by_hf(model, ids, monkeypatch)
    drafter = MTPDrafter.from_pretrained(tmp_path, model, num_depths)
    known = text[:, : 6 + seed]
    result = SpeculativeGenerator(model, drafter).generate(
        known, torch.ones_like(known), max_new_tokens=NUM_NEW - 1, do_sample=False, trace=True
    )
    assert result.sequences.equal(text)
    ours, length = [], known.shape[1]
    for step in result.trace[0]:
        ours.append((length, step.draft_tokens))
        length += step.num_accepted + 1
    assert ours == theirs
    if num_depths > 1:
        assert len({step.num_accepted for step in result.trace[0]}) > 1


def test_hf_fails_on_a_text_shorter_than_its_depths_and_we_do_not(tmp_path, monkeypatch):
    model = target_with_modules(tmp_path, "DeepseekV3", 3, 2)
    ids = prompt(2, 1)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        drafted_by_hf(model, ids, monkeypatch)
    drafter = MTPDrafter.from_pretrained(tmp_path, model, 3)
    options = {"max_new_tokens": NUM_NEW, "do_sample": False}
    mask = torch.ones_like(ids)
    result = SpeculativeGenerator(model, drafter).generate(ids, mask, **options)
    text = model.generate(ids, attention_mask=mask, pad_token_id=0, **options)
    assert result.sequences.equal(text)


def test_another_reading_drafts_other_tokens_than_hf(tmp_path, monkeypatch):
    """The comparison sees what a reading gets wrong."""
    model = target_with_modules(tmp_path, "Glm4Moe", 3, 2)
    text, theirs = drafted_by_hf(model, prompt(3, 6), monkeypatch)
    last_state = model.config.num_hidden_layers
    for wrong in (
        {"semantics": "target"},
        {"feedback_norm": False},
        {"hidden_first": True},
        {"feature_layers": (last_state,)},
    ):
        drafter = MTPDrafter.from_pretrained(tmp_path, model, 3, **wrong)
        known = text[:, :7]
        result = SpeculativeGenerator(model, drafter).generate(
            known, torch.ones_like(known), max_new_tokens=NUM_NEW - 1, do_sample=False, trace=True
        )
        assert result.sequences.equal(text)  # lossless in any case
        assert [s.draft_tokens for s in result.trace[0]] != [tokens for _, tokens in theirs], wrong


@pytest.mark.skipif(not HAS_MELLUM, reason="transformers has no Mellum")
def test_mellums_modules_are_refused_where_transformers_does_not_describe_them(
    tmp_path, monkeypatch
):
    """They slide, and without a key that says so they would be built as full attention."""
    model = random_model("Mellum", vocab_size=VOCAB)
    write_mtp_names(tmp_path, model, model.model.layers[1])
    if hasattr(transformers.MellumConfig, "num_mtp_layers"):
        survey_checkpoint(tmp_path, families=(MTP,))
        monkeypatch.delattr(transformers.MellumConfig, "num_mtp_layers")
    message = f"not supported: Mellum's modules with transformers {transformers.__version__}; 5.23"
    for target in (None, model):
        with pytest.raises(ValueError, match=message):
            survey_checkpoint(tmp_path, target, families=(MTP,))
