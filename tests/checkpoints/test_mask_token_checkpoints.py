"""Mask-token checkpoints of every producer are read as their producers mean them, and what the
library does not have is refused by name.

The expectations are written out by hand: the configuration in the library's terms, and the head's
own names of the file's tensors.
"""

from dataclasses import replace

import pytest
import torch
from architectures import VOCAB
from checkpoint_parts import DRAFT_VOCAB, HIDDEN, noise, rope, tiny_llama
from checkpoint_writer import specforge
from mask_checkpoints import (
    DFLASH2_KEYS,
    MASK,
    amazon,
    deepspec,
    dflash2_shapes,
    domino,
    hf_assistant,
    markov_shapes,
    more,
    pard,
    specforge_peagle,
    speculators_dflash,
    speculators_peagle,
    torchspec,
    xpress_shapes,
    z_lab,
)

from specdec.checkpoints import survey_checkpoint
from specdec.checkpoints.eagle import EAGLE
from specdec.checkpoints.mask_token import MASK_TOKEN
from specdec.drafters import MaskTokenConfig, MaskTokenDrafter
from specdec.heads.correction import DominoConfig, MarkovConfig, SelectorConfig, XPressConfig
from specdec.heads.layers import Convolution, LayerConfig
from specdec.inspection import alternatives

TARGET = tiny_llama()
LAYER = LayerConfig(32, 24, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5)
SIZES = {
    "layer": LAYER,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "target_hidden_size": HIDDEN,
    "num_layers": 2,
    "mask_token_id": MASK,
}
P_EAGLE = MaskTokenConfig("shifted", "input", feature_layers=(2, 4, 5), **SIZES)
FULL = SIZES | {"draft_vocab_size": VOCAB}
DFLASH = MaskTokenConfig(
    *("same-position", "keys"),
    feature_layers=(2, 5),
    block_size=6,
    is_causal=False,
    has_lm_head=False,
    **(FULL | {"layer": replace(LAYER, has_qk_norm=True, rope=rope(1e6))}),
)
PARD = MaskTokenConfig(
    *("unshifted", "none"),
    feature_layers=(),
    has_embed_tokens=True,
    max_positions=2048,
    **(FULL | {"num_layers": 3, "layer": replace(LAYER, rope=rope(500000))}),
)
LONG = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
DEEPSPEC = replace(
    DFLASH,
    alignment="next-token",
    feature_layers=(0, 2, 6),
    block_size=7,
    has_embed_tokens=True,
    has_lm_head=True,
)
SPECULATORS_DFLASH = replace(
    DFLASH, layer=replace(DFLASH.layer, rope=rope(500000), **LONG), block_size=5
)
ASSISTANT = "Hugging Face's assistant"
CASES = {
    "amazon": (amazon(), P_EAGLE),
    "amazon, vector": (amazon().plus(mask_hidden=noise(3 * HIDDEN)), P_EAGLE),
    "amazon, one layer, two features": (
        amazon(ids=[1, 3], layers=1),
        replace(P_EAGLE, num_layers=1, feature_layers=(1, 3)),
    ),
    "amazon, norm before residual": (
        amazon(norm_before_residual=True),
        replace(P_EAGLE, norm_before_residual=True),
    ),
    "speculators peagle": (
        speculators_peagle(),
        replace(
            P_EAGLE,
            layer=replace(
                LAYER, rope=rope(500000), rms_norm_eps=1e-6, max_position_embeddings=2048
            ),
            has_embed_tokens=True,
        ),
    ),
    "SpecForge": (
        specforge_peagle(mask_token_id=MASK),
        replace(P_EAGLE, layer=replace(LAYER, rope=rope(1e6))),
    ),
    "PARD, Llama": (pard(), PARD),
    "PARD, Llama, tied": (pard(tied=True), replace(PARD, ties_embeddings=True)),
    "PARD, Qwen2": (
        pard("qwen2"),
        replace(PARD, layer=replace(PARD.layer, attention_bias=True)),
    ),
    "PARD, Qwen3": (pard("qwen3"), replace(PARD, layer=replace(PARD.layer, has_qk_norm=True))),
    "z-lab": (z_lab(), DFLASH),
    "z-lab, block size in dflash_config": (
        z_lab(nested=True, block_size=4),
        replace(DFLASH, block_size=4),
    ),
    "z-lab, no layer ids": (
        z_lab(ids=None, layers=3),
        replace(DFLASH, num_layers=3, feature_layers=(2, 4, 6)),
    ),
    "z-lab, one layer, no layer ids": (
        z_lab(ids=None, layers=1),
        replace(DFLASH, num_layers=1, feature_layers=(5,)),
    ),
    "TorchSpec": (
        torchspec(),
        replace(DFLASH, num_layers=1, feature_layers=(2, 4, 6), has_embed_tokens=True),
    ),
    ASSISTANT: (hf_assistant(), DFLASH),
    "speculators dflash": (
        speculators_dflash(),
        replace(
            DFLASH,
            layer=replace(DFLASH.layer, rope=rope(500000), **LONG),
            block_size=5,
            draft_vocab_size=DRAFT_VOCAB,
            has_lm_head=True,
        ),
    ),
    "speculators dflash, all ids, from the anchor": (
        speculators_dflash(full=True, sample_from_anchor=True),
        replace(
            DFLASH,
            alignment="next-token",
            layer=replace(DFLASH.layer, rope=rope(500000), **LONG),
            block_size=5,
        ),
    ),
    "DeepSpec": (deepspec(), DEEPSPEC),
    "DeepSpec, Markov": (
        more(deepspec(), markov_shapes(), markov_rank=4, markov_head_type="vanilla"),
        replace(DEEPSPEC, correction=MarkovConfig(4)),
    ),
    "DeepSpec, Markov and confidence": (
        more(
            deepspec(enable_confidence_head=True, confidence_head_with_markov=True),
            markov_shapes(3, "rnn", confidence=HIDDEN + 3),
            markov_rank=3,
            markov_head_type="rnn",
        ),
        replace(DEEPSPEC, correction=MarkovConfig(3, "rnn"), confidence="markov"),
    ),
    "SpecForge, DSpark": (
        more(
            z_lab(
                dflash={
                    "projector_type": "dspark",
                    "attention_mode": "gqa",
                    "markov_rank": 4,
                    "markov_head_type": "gated",
                    "enable_confidence_head": True,
                    "confidence_head_alpha": 1.0,
                }
            ),
            markov_shapes(kind="gated", confidence=HIDDEN),
            architectures=["DSparkDraftModel"],
        ),
        replace(
            DFLASH,
            alignment="next-token",
            correction=MarkovConfig(4, "gated"),
            confidence="hidden",
        ),
    ),
    "SpecForge, Domino": (domino(), replace(DFLASH, correction=DominoConfig(5, 6, first=1))),
    "SpecForge, Domino, shifted labels": (
        domino(first=0, shift_label=True),
        replace(DFLASH, alignment="next-token", correction=DominoConfig(5, 6)),
    ),
    "z-lab, DFlash 2": (
        more(
            z_lab(dflash=DFLASH2_KEYS, architectures=["DFlash2DraftModel"]),
            dflash2_shapes(suffix=".weight"),
        ),
        replace(
            DFLASH,
            layer=replace(DFLASH.layer, convolution=Convolution(3, 4)),
            correction=SelectorConfig(4, 5),
        ),
    ),
    "speculators dflash2": (
        more(
            speculators_dflash(full=True, speculators_model_type="dflash2"),
            dflash2_shapes(),
            **DFLASH2_KEYS,
        ),
        replace(
            SPECULATORS_DFLASH,
            layer=replace(SPECULATORS_DFLASH.layer, convolution=Convolution(3, 4)),
            correction=SelectorConfig(4, 5),
        ),
    ),
    "speculators dspark": (
        more(
            speculators_dflash(
                speculators_model_type="dspark", sample_from_anchor=None, markov_rank=4
            ),
            markov_shapes(ids=DRAFT_VOCAB),
        ),
        replace(
            SPECULATORS_DFLASH,
            alignment="next-token",
            draft_vocab_size=DRAFT_VOCAB,
            has_lm_head=True,
            correction=MarkovConfig(4),
        ),
    ),
    "speculators dspark, masks alone": (
        more(
            speculators_dflash(full=True, speculators_model_type="dspark", markov_rank=4),
            markov_shapes(),
        ),
        replace(SPECULATORS_DFLASH, correction=MarkovConfig(4)),
    ),
    "speculators xpress": (
        more(
            speculators_dflash(full=True, speculators_model_type="xpress"),
            xpress_shapes(),
            xpress_rank=3,
            num_jacobi_passes=6,
        ),
        replace(SPECULATORS_DFLASH, correction=XPressConfig(3)),
    ),
    "z-lab, sliding windows": (
        z_lab(
            layer_types=["sliding_attention", "full_attention"],
            use_sliding_window=True,
            sliding_window=8,
        ),
        replace(DFLASH, layer=replace(DFLASH.layer, windows=(8, None))),
    ),
    "z-lab, windows both ways": (
        z_lab(layer_types=["sliding_attention"] * 2, sliding_window=8, dflash={"causal": False}),
        replace(DFLASH, layer=replace(DFLASH.layer, windows=(8, 8), is_window_causal=False)),
    ),
    "MiMo: use_swa and sinks": (
        more(
            z_lab(dflash={"use_swa": True, "swa_window_size": 7, "attention_sink_bias": True}),
            {f"layers.{i}.self_attn.attention_sink_bias": (4,) for i in range(2)},
        ),
        replace(
            DFLASH,
            layer=replace(DFLASH.layer, windows=(7, 7), is_window_causal=False, has_sinks=True),
        ),
    ),
    "causal block": (z_lab(dflash={"causal": True}), replace(DFLASH, is_causal=True)),
    "causal block, said at the top": (z_lab(is_causal=True), replace(DFLASH, is_causal=True)),
    "both ways, said at the top": (
        z_lab(layer_types=["sliding_attention"] * 2, sliding_window=8, is_causal=False),
        replace(DFLASH, layer=replace(DFLASH.layer, windows=(8, 8), is_window_causal=False)),
    ),
    "the same, said twice": (
        domino(shift_label=True).but(shift_label=True),
        replace(DFLASH, alignment="next-token", correction=DominoConfig(5, 6, first=1)),
    ),
    "MiMo, no sliding layers of its target": (
        z_lab(dflash={"use_swa": True, "swa_window_size": 7}, use_sliding_window=False),
        replace(DFLASH, layer=replace(DFLASH.layer, windows=(7, 7), is_window_causal=False)),
    ),
    "speculators dflash, windows": (
        speculators_dflash(
            full=True,
            layer_keys={
                "layer_types": ["sliding_attention"] * 2,
                "sliding_window": 6,
                "use_sliding_window": True,
            },
        ),
        replace(SPECULATORS_DFLASH, layer=replace(SPECULATORS_DFLASH.layer, windows=(6, 6))),
    ),
    "Hugging Face's assistant, windows": (
        hf_assistant(layer_types=["sliding_attention", "full_attention"]),
        replace(
            DFLASH,
            layer=replace(DFLASH.layer, windows=(2049, None), is_window_causal=False),
        ),
    ),
    "learned embedding": (
        z_lab(dflash={"mask_token_id": None}).plus(mask_embedding=noise(HIDDEN)),
        replace(DFLASH, mask_token_id=None),
    ),
}


OTHER_STARTS = {
    **{"markov_head.": "correction.", "refiner_head.": "correction."},
    **{"candidate_selector.": "correction.", "confidence_head.proj.": "confidence_head."},
    **{"prefix_gru.": "correction.prefix_gru.", "embed_proj.": "correction.embed_proj."},
}
OTHER_NAMES = {
    **{"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"},
    **{"encoder.fc": "fc", "encoder.output_norm_enc": "hidden_norm"},
}


def survey(folder, target=TARGET, **options):
    return survey_checkpoint(folder, target, families=(MASK_TOKEN, EAGLE), **options)


def read(folder, **options):
    return survey(folder, **options).load(TARGET)


def own_names(files, config):
    """The file's tensors by the head's names: prefixes dropped, vectors of masks shaped alike."""
    renamed = {name.removeprefix("model."): t for name, t in files.tensors.items()}
    for theirs, name in OTHER_NAMES.items():
        if f"{theirs}.weight" in renamed:
            renamed[f"{name}.weight"] = renamed.pop(f"{theirs}.weight")
    for theirs, ours in OTHER_STARTS.items():
        renamed = {
            ours + n.removeprefix(theirs) if n.startswith(theirs) else n: t
            for n, t in renamed.items()
        }
    renamed = {
        n.replace("attention_sink_bias", "sinks").replace("codebook.weight", "codebook"): t
        for n, t in renamed.items()
    }
    for name in ("mask_hidden", "mask_embedding"):
        if name in renamed:
            renamed[name] = renamed[name].reshape(1, 1, -1)
    ids = renamed.pop("d2t", None)
    renamed.pop("t2d", None)
    return renamed, ids


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_is_read_as_its_producer_means_it(name, tmp_path):
    files, expected = CASES[name]
    checkpoint = read(files.write(tmp_path))
    assert checkpoint.family is MASK_TOKEN
    assert checkpoint.config == expected
    tensors, d2t = own_names(files, expected)
    assert checkpoint.tensors.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert checkpoint.tensors[key].equal(tensor), key
    if d2t is None:
        assert checkpoint.target_ids is None
    else:
        assert checkpoint.target_ids.equal(d2t + torch.arange(DRAFT_VOCAB))
    head = checkpoint.build()
    for key, tensor in head.state_dict().items():
        assert tensor.equal(tensors[key]), key
    assert head.training is False
    if name.startswith(ASSISTANT):  # which leaves its vocabulary to the target
        return
    found = survey(tmp_path, None)
    assert found.config == expected
    assert found.faults == ()
    assert found.unread_keys in ((), ("auto_map",), ("auto_map", "num_target_layers")), name


def test_an_assistant_needs_its_target(tmp_path):
    with pytest.raises(ValueError, match="leaves vocab_size to the target: pass one"):
        survey(hf_assistant().write(tmp_path), None)


@pytest.mark.parametrize(("own", "cut"), [(VOCAB + 5, VOCAB), (VOCAB - 5, VOCAB - 5)])
@pytest.mark.parametrize("tied", [False, True])
def test_the_padding_of_a_pard_models_vocabulary_is_cut_or_left_out(own, cut, tied, tmp_path):
    files = pard(vocab_size=own, tied=tied)
    checkpoint = read(files.write(tmp_path))
    config, table = checkpoint.config, files.tensors["model.embed_tokens.weight"]
    assert (config.vocab_size, config.draft_vocab_size) == (VOCAB, cut)
    embeddings = checkpoint.tensors["embed_tokens.weight"]
    assert embeddings.shape == (VOCAB, HIDDEN)
    assert embeddings[:cut].equal(table[:cut])
    assert not bool(embeddings[own:].any())
    drafter = MaskTokenDrafter(checkpoint.build(), TARGET, 2)
    logits = drafter.head.over_target_ids(drafter.logits(torch.randn(1, 3, HIDDEN)))
    assert logits.shape == (1, 3, VOCAB)
    assert bool(logits[..., own:].isinf().all())
    assert bool(logits[..., :cut].isfinite().all())


UNSUPPORTED = {
    "PARD-2": pard(pard2_target_layers=[1, 2]),
    "layer_types .'linear_attention'": z_lab(layer_types=["linear_attention"] * 2),
    "dflash_config.attention_value_scale 2": z_lab(dflash={"attention_value_scale": 2}),
    "dflash_config.final_logit_softcapping": z_lab(dflash={"final_logit_softcapping": 30.0}),
    "is_neox_style false": z_lab(is_neox_style=False),
    "architecture DFlare": z_lab(architectures=["QwenDFlareDraftModel"]),
    "use_sliding_window of a P-EAGLE head": amazon(use_sliding_window=True),
    "dflash_config.use_aux_hidden_state: false": z_lab(dflash={"use_aux_hidden_state": False}),
    "model_type 'gpt_neox'": pard("gpt_neox"),
    "kv_lora_rank: a drafter": amazon(kv_lora_rank=16),
    "mlp_bias": pard(mlp_bias=True),
    "quantization_config": z_lab(quantization_config={"bits": 4}),
    "tensors .*experts": pard().plus(model__layers__0__mlp__experts__0__w=noise(3)),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_what_the_library_does_not_have_is_refused_by_name(reason, tmp_path):
    folder = UNSUPPORTED[reason].write(tmp_path)
    with pytest.raises(ValueError, match=f"not supported: .*{reason}"):
        survey(folder)


def test_files_beside_a_checkpoint_that_change_it_are_refused_by_name(tmp_path):
    beside = {"warp_model.bin": pard(), "pard_warp_model": pard(), "mask_embedding.pt": z_lab()}
    for name, files in beside.items():
        folder = files.write(tmp_path / name)
        (folder / name).write_bytes(b"")
        with pytest.raises(ValueError, match=r"supported: .*(PARD-2|mask_embedding.pt)"):
            survey(folder)


CONTRADICTIONS = {
    "names two values of markov_rank": more(
        deepspec(markov_rank=4, dflash_config={"markov_rank": 3}), markov_shapes()
    ),
    "markov_head_type must be a string": more(
        deepspec(markov_rank=4, markov_head_type=3), markov_shapes()
    ),
    "MarkovConfig.kind must be 'vanilla'": more(
        deepspec(markov_rank=4, markov_head_type="lstm"), markov_shapes()
    ),
    "layer_types names 1 of 2 layers": z_lab(layer_types=["full_attention"]),
    "use_sliding_window needs layer_types": z_lab(layer_types=None, use_sliding_window=True),
    "sliding layers need sliding_window, a number of positions, got None": z_lab(
        layer_types=["sliding_attention"] * 2
    ),
    "names no id of a mask token; pass mask_token_id= .command line: --mask-token-id": (
        specforge_peagle()
    ),
    "names no id of a mask token but the text '<.MASK.>'": z_lab(
        dflash={"mask_token_id": None, "mask_token": "<|MASK|>"}
    ),
    "names more than one mask token: .*'mask_token_id': 3": amazon(mask_token_id=3),
    "ptd_token_id must be an id in 0..60, got True": amazon(ptd_token_id=True),
    "lacks block_size": z_lab().but(block_size=...),
    "block_size must be an integer in 1..1024, got 0": z_lab(block_size=0),
    "names two values of block_size: 6 at the top and 4 as dflash_config.block_size": z_lab(
        dflash={"block_size": 4}
    ),
    "two values of sample_from_anchor: True at the top and False as dflash_config.sample": z_lab(
        dflash={"sample_from_anchor": False}, sample_from_anchor=True
    ),
    "two values of shift_label: True at the top and False as dflash_config.shift_label": domino(
        shift_label=False
    ).but(shift_label=True),
    "names two values of attention_sink_bias": z_lab(
        dflash={"attention_sink_bias": False}, attention_sink_bias=True
    ),
    "names two values of is_causal: True at the top and False as dflash_config.causal": z_lab(
        dflash={"causal": False}, is_causal=True
    ),
    "is_causal must be true or false, got 1": z_lab(is_causal=1),
    "use_sliding_window is false; set it to true": z_lab(
        layer_types=["sliding_attention"] * 2, sliding_window=8, use_sliding_window=False
    ),
    "use_swa., and use_sliding_window is false": z_lab(
        dflash={"use_swa": True}, sliding_window=8, use_sliding_window=False
    ),
    "at least 2 rows, got 1": z_lab(block_size=1),
    "made for a target of 12 layers, but LlamaForCausalLM has 8": z_lab(num_target_layers=12),
    "leads to 3 features": z_lab().but(
        dflash_config={"mask_token_id": MASK, "target_layer_ids": [1, 2, 4]}
    ),
    "names layers more than once": z_lab(target_layer_ids=[1, 3]),
    "names no layers of features": speculators_dflash().but(aux_hidden_state_layer_ids=None),
    "made for a target with a vocabulary of 70": z_lab(vocab_size=70),
    "missing hidden_norm.weight": z_lab().but("hidden_norm.weight"),
    "missing mask_hidden": amazon().but("mask_hidden"),
    r"mask_hidden has shape \[1, 64\]": amazon().plus(mask_hidden=noise(1, 2 * HIDDEN)),
    "missing lm_head.weight": pard().but("lm_head.weight"),
    "missing .*layers.0.self_attn.q_proj.bias": pard(attention_bias=True),
    "unexpected layers.3": pard(layers=4).but(num_hidden_layers=3),
}


@pytest.mark.parametrize("reason", CONTRADICTIONS)
def test_a_checkpoint_that_contradicts_itself_is_refused(reason, tmp_path):
    folder = CONTRADICTIONS[reason].write(tmp_path)
    with pytest.raises(ValueError, match=reason):
        read(folder)


SIZES_OF_CORRECTIONS = {
    "markov_rank": more(deepspec(), markov_shapes()),
    "emb_dim": domino(),
    "gru_hidden_dim": domino(),
    "pure_draft_prefix_len": domino(),
    "selector_rank": z_lab(architectures=["DFlash2DraftModel"]),
    "selector_top_k": z_lab(architectures=["DFlash2DraftModel"]),
    "conv_kernel_size": z_lab(architectures=["DFlash2DraftModel"]),
    "conv_group_size": z_lab(architectures=["DFlash2DraftModel"]),
    "xpress_rank": speculators_dflash(speculators_model_type="xpress"),
    "xpress_mlp_ratio": speculators_dflash(speculators_model_type="xpress"),
}


@pytest.mark.parametrize("key", SIZES_OF_CORRECTIONS)
@pytest.mark.parametrize("value", [[4], {"a": 1}, "4"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_size_of_a_correction_is_an_integer(key, value, nested, tmp_path):
    files = SIZES_OF_CORRECTIONS[key]
    flash = files.config.get("dflash_config", {})
    flash = {name: size for name, size in flash.items() if name != key}
    places = {"dflash_config": flash | {key: value}, key: ...} if nested else {}
    folder = files.but(**(places or {"dflash_config": flash, key: value})).write(tmp_path)
    with pytest.raises(ValueError, match=rf"config\.json: {key} must be an integer in .*, got "):
        survey(folder)


OPTIONS = {
    "mask_token_id": (specforge_peagle(), {"mask_token_id": 4}, "mask_token_id", 4),
    "another mask": (amazon(), {"mask_token_id": 4}, "mask_token_id", 4),
    "alignment": (z_lab(), {"alignment": "next-token"}, "alignment", "next-token"),
    "is_causal": (z_lab(), {"is_causal": True}, "is_causal", True),
    "feature_layers": (z_lab(), {"feature_layers": (1, 4)}, "feature_layers", (1, 4)),
    "layer_convention": (z_lab(), {"layer_convention": "boundary"}, "feature_layers", (1, 4)),
    "layer": (
        z_lab(),
        {"layer": {"windows": (4, None)}},
        "layer",
        replace(DFLASH.layer, windows=(4, None)),
    ),
    "residual": (amazon(), {"norm_before_residual": True}, "norm_before_residual", True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_caller_may_know_better(name, tmp_path):
    files, options, field, value = OPTIONS[name]
    found = survey(files.write(tmp_path), **options)
    assert getattr(found.config, field) == value
    assert "asked for" in " ".join(found.notes)


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (pard(), {"feature_layers": (1,)}, "feature_layers: a PARD head has none; drop it"),
        (z_lab(), {"norm_before_residual": True}, "norm_before_residual: a DFlash head has none"),
        (z_lab(), {"mask_token_id": 99}, r"mask_token_id .asked for. must be an id in 0..60"),
        (z_lab(), {"alignment": "unshifted"}, "goes with context='none', got 'keys'"),
        (z_lab(), {"layer": {"window": 3}}, "layer must be a dict of fields of LayerConfig"),
        (z_lab(), {"layer": 3}, "layer must be a dict of fields of LayerConfig, got 3"),
        (z_lab(), {"feedback_norm": True}, "unknown option feedback_norm; expected alignment"),
    ],
)
def test_options_that_make_no_sense_are_refused(files, options, message, tmp_path):
    with pytest.raises((ValueError, TypeError), match=message):
        survey(files.write(tmp_path), **options)


def test_a_sequential_head_is_left_to_its_own_family(tmp_path):
    assert survey(specforge().write(tmp_path)).family is EAGLE
    with pytest.raises(ValueError, match=r"none of the families .*mask token .keys ptd_token_id"):
        survey_checkpoint(tmp_path, TARGET, families=(MASK_TOKEN,))


def test_other_readings_are_those_that_the_tensors_allow(tmp_path):
    names = {}
    for kind, files in {"p-eagle": amazon(), "pard": pard(), "dflash": z_lab()}.items():
        found = survey(files.write(tmp_path / kind))
        readings = alternatives(found, found.load(TARGET), TARGET)
        names[kind] = [reading.name for reading in readings]
        for reading in readings:
            reading.checkpoint.build()  # the same tensors fit
    assert names["pard"] == ["as read", "rope base 10000, the target's"]
    assert names["p-eagle"][:3] == [
        "as read",
        "one layer lower: boundaries 1, 3, 4",
        "one layer higher: boundaries 3, 5, 6",
    ]
    assert "norm_before_residual True" in names["p-eagle"]
    assert "d2t as absolute ids" not in names["dflash"]
    assert names["dflash"][1:5] == [
        "one layer lower: boundaries 1, 4",
        "one layer higher: boundaries 3, 6",
        "alignment next-token",
        "is_causal True",
    ]
