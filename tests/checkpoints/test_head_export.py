"""Files of a saved head are what others read, and what no file can say is refused.

That what is written reads back equal is a law of all records: `test_layout_laws.py`.
"""

import json
from dataclasses import replace

import pytest
import torch
from architectures import VOCAB, build
from checkpoint_cases import LLAMA3
from checkpoint_files import HIDDEN, TARGET, read, rope, tiny_llama
from checkpoint_layouts import IDS
from eagle_heads import head_for, random_head
from mask_heads import WIRINGS, config_for
from mask_heads import random_head as random_mask_head
from mask_reference import draft_logits
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config

from specdec import MaskTokenDrafter, SpeculativeGenerator
from specdec.checkpoints.export import layouts_of, save_head
from specdec.drafters import EagleDrafter

MODEL = build("llama")
LLAMA3 = rope(1e6, rope_type="llama3", **LLAMA3)
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
SCALED_DYNAMIC = LINEAR | {"rope_type": "dynamic", "original_max_position_embeddings": 64}
FEW_IDS = {"draft_vocab_size": 20}


def eagle(kind="attention", **flags):
    """A drafter of a random head, its ids ascending."""
    layers = {"feature_layers": (1, 4, 7)} if kind == "attention" else {}
    head = head_for(TARGET, kind=kind, **(layers | flags))
    if head.target_ids is not None:
        head.target_ids.copy_(head.target_ids.sort().values)
    return EagleDrafter(head, TARGET, num_draft_tokens=3)


def mask(name, **flags):
    """A drafter of a random head of a wiring, in float32."""
    flags = {"feature_layers": (1, 2, 3)[: len(WIRINGS[name].feature_layers)]} | flags
    config = config_for(MODEL, name, **flags)
    if config.context == "none":
        layer = replace(config.layer, max_position_embeddings=64)
        config = replace(config, layer=layer, max_positions=64)
    return MaskTokenDrafter(random_mask_head(config, dtype=torch.float32), MODEL, 2)


OBSTACLES = [  # That a field is not said where it is not usual is a law of all records.
    ("as 'speculators' it can", eagle, "attention", "safeailab", {"num_layers": 3}),
    ("fusion=input", eagle, "input", "speculators", {}),
    ("feature_.*'final'", eagle, "attention", "safeailab", {"feature_layers": (1, 4, "final")}),
    (r"layers=\(4, 1, 7\)", eagle, "attention", "speculators", {"feature_layers": (4, 1, 7)}),
    ("rope=.*original_max_", eagle, "attention", "safeailab", {"rope": SCALED_DYNAMIC}),
    ("mask_token_id=None", mask, "p-eagle, learned embedding", "speculators", {}),
    ("mask_token_id=None", mask, "dflash, learned embedding", "z-lab", {}),
    ("block_size=None", mask, "dflash, causal", "z-lab", {}),
    ("has_embed_tokens=True, has_lm_head=True", mask, "dflash, own tables", "z-lab", {}),
    (r"feature_layers=\(0, 2\)", mask, "dflash", "z-lab", {"feature_layers": (0, 2)}),
    ("correction=Domino.* none of the layouts", mask, "domino", "speculators", {}),
    ("correction=LiLiCorr.* none of the layouts", mask, "lilicorr", "z-lab", {}),
    ("correction=Markov.*'speculators'", mask, "dspark, gated", "z-lab", {"has_lm_head": False}),
    ("correction=XPress.* as 'speculators'", mask, "xpress", "z-lab", {}),
    ("alignment=next-token", mask, "dspark", "z-lab", {"has_lm_head": False}),
    ("convolution=None", mask, "dflash2, next token", "speculators", {}),
    ("windows=", mask, "pard, windows", "huggingface", {}),
    (r"windows=\(7, 8\)", mask, "dflash, windows both ways", "z-lab", {}),
    ("causal windows beside layers that", mask, "dflash, windows", "speculators", {}),
]


@pytest.mark.parametrize(("obstacle", "make", "name", "layout", "flags"), OBSTACLES)
def test_what_a_layout_cannot_express_is_refused(obstacle, make, name, layout, flags, tmp_path):
    drafter = make(name, **flags)
    with pytest.raises(ValueError, match=f"the {layout} layout cannot express .*{obstacle}"):
        drafter.save_pretrained(tmp_path / "head", layout, verifier="a/b")
    assert not (tmp_path / "head").exists()


def test_what_no_layout_has_is_refused(tmp_path):
    permuted = random_head(eagle().config, dtype=torch.float32)
    permuted.target_ids = torch.arange(VOCAB).flip(0)
    longer = random_mask_head(config_for(MODEL, "pard"), dtype=torch.float32)
    for drafter, layout, message in (
        (eagle(), "vllm", "of EagleConfig heads must be 'safeailab' or 'speculators', got 'vllm'"),
        (mask("domino"), None, "cannot express correction=DominoConfig.*; none of the layouts"),
        (mask("domino"), "specforge", "must be 'speculators', 'vllm', 'huggingface' or 'z-lab'"),
        (eagle(), "speculators", "names its target: pass verifier=, a Hugging Face id"),
        (MaskTokenDrafter(longer, MODEL, 2), None, "huggingface layout cannot express max_posit"),
        (EagleDrafter(permuted, TARGET), None, "can express a permuted full vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            drafter.save_pretrained(tmp_path / "head", *([layout] if layout else []))
    tables = {"verifier": "a/b", "lm_head": None}
    for table in (None, torch.zeros(VOCAB, HIDDEN, dtype=torch.int8), torch.zeros(3, HIDDEN)):
        with pytest.raises(ValueError, match="pass them as embed_tokens"):
            save_head(eagle().head, tmp_path / "head", "speculators", embed_tokens=table, **tables)
    assert not list(tmp_path.iterdir())


def saved(drafter, folder, layout="safeailab", verifier="a/b"):
    """The keys and the tensors of a head's files."""
    drafter.save_pretrained(folder, layout, verifier=verifier)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("has_own", [True, False])
def test_a_speculators_file_holds_embeddings_and_names_its_target(has_own, tmp_path):
    """speculators reads a file without embeddings into memory that nobody has written."""
    TARGET.save_pretrained(tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target").eval()
    drafter = EagleDrafter(eagle(has_embed_tokens=has_own).head, target)
    keys, tensors = saved(drafter, tmp_path / "head", "speculators", verifier=None)
    own = drafter.head.embed_tokens.weight if has_own else TARGET.model.embed_tokens.weight
    assert tensors["embed_tokens.weight"].equal(own)
    assert keys["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "target")


NOTED = {
    "cannot load rope_scaling of type 'llama3'": {"rope": LLAMA3},
    "a rope base of 10000 with scaling, not 500": {"rope": LINEAR | {"rope_theta": 5e5}},
    "always reads hidden states [2, 4, 5], not [1, 4, 7]": {"feature_layers": (1, 4, 7)},
    "takes hidden_size / heads for head_dim, not 10": {"head_dim": 10},
}


@pytest.mark.parametrize("note", NOTED)
def test_what_only_safeailabs_own_code_misreads_is_noted(note, tmp_path):
    flags = {"feature_layers": (2, 4, 5), "head_dim": 8} | NOTED[note]
    (said,) = eagle(**flags).save_pretrained(tmp_path)
    assert note in said


def test_the_safeailab_layout_has_the_reference_names_and_keys(tmp_path):
    linear = {f"self_attn.{n}_proj" for n in "qkvo"}
    linear |= {f"mlp.{n}_proj" for n in ("gate", "up", "down")} | {"post_attention_layernorm"}
    keys, tensors = saved(eagle(**FEW_IDS), tmp_path / "3")
    names = {f"midlayer.{name}.weight" for name in linear | {"input_layernorm", "hidden_norm"}}
    assert tensors.keys() == names | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert (torch.arange(20) + tensors["d2t"]).equal(tensors["t2d"].nonzero()[:, 0])
    assert tensors["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * HIDDEN
    assert (keys["draft_vocab_size"], keys["vocab_size"]) == (20, VOCAB)
    # vLLM reads the key at the top, as hidden states; SGLang the nested one, as outputs of layers.
    assert keys["eagle_aux_hidden_state_layer_ids"] == [1, 4, 7]
    assert keys["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 6]
    assert isinstance(AutoConfig.from_pretrained(tmp_path / "3"), LlamaConfig)
    # Its configuration class loads exactly a type and a factor, a float.
    keys, _ = saved(eagle(rope=LINEAR | {"factor": 2}), tmp_path / "scaled")
    assert repr(keys["rope_scaling"]) == repr({"type": "linear", "factor": 2.0})
    keys, tensors = saved(eagle("input", fc_bias=True), tmp_path / "1")
    names = {f"layers.0.{name}.weight" for name in linear}
    assert tensors.keys() == names | {"fc.weight", "fc.bias"}
    assert (keys["bias"], keys["qkv_bias"], keys["num_hidden_layers"]) == (True, False, 1)


TABLE = {"embed_tokens.weight": (VOCAB, HIDDEN)}
FOUR = {"feature_layers": (0, 1, 2, 3), "fc_norm": True}
FOUR_KEPT = {"num_aux_hidden_states": 4, "fc_norm": True}


def test_files_hold_what_their_readers_expect(tmp_path):
    """vLLM 0.32.0 takes a missing `norm_before_residual` for true. Of a speculators file it keeps
    little more than `transformer_layer_config`, and its P-EAGLE head takes three features and no
    norms without these keys (`update_peagle`). `sliding_window_non_causal: false` makes every layer
    causal, and a file of kind `dflash` is run in the same position whatever `sample_from_anchor`
    says (`update_dflash`, `v1/spec_decode/dflash.py`). A head of six rows drafts six tokens, but
    five if it is `dflash`.
    """

    def check(drafter, layout, shapes, tokens=None, of_layers=None, **keys):
        held, tensors = saved(drafter, tmp_path / str(len(list(tmp_path.iterdir()))), layout)
        assert held | keys == held
        assert all(tuple(tensors[name].shape) == shape for name, shape in shapes.items())
        if layout == "speculators":
            assert held["transformer_layer_config"].items() >= (of_layers or {}).items()
            proposal = held["speculators_config"]["proposal_methods"][0]
            assert proposal["speculative_tokens"] == tokens or tokens is None
            assert held["speculators_config"]["verifier"]["name_or_path"] == "a/b"
        return tensors

    p_eagle, three = mask("p-eagle", **FOUR), {"num_aux_hidden_states": 3}
    first = {"layers.0.hidden_norm.weight": (HIDDEN,)}
    check(eagle(), "speculators", first, 3, three, norm_before_residual=False)
    mask_id = {"speculators_model_type": "peagle", "mask_token_id": 7, IDS: [1, 2, 3]}
    check(mask("p-eagle"), "speculators", {"mask_hidden": (1, 1, 96), **TABLE}, **mask_id)
    check(p_eagle, "vllm", {}, **FOUR_KEPT)
    check(p_eagle, "speculators", {}, of_layers=FOUR_KEPT)
    markov, kind = {"markov_head.markov_w2.weight": (VOCAB, 3)}, "vanilla"
    drafter = mask("p-eagle, markov")
    check(drafter, "speculators", markov, markov_rank=3, markov_head_type=kind)
    flash = {"target_layer_ids": [0, 1], "mask_token_id": 7}
    tensors = check(mask("dflash"), "z-lab", {}, block_size=6, dflash_config=flash)
    assert "embed_tokens.weight" not in tensors
    check(mask("dflash"), "speculators", TABLE, aux_hidden_state_layer_ids=[1, 2])
    for kind, count in (("dflash", 5), ("dspark", 6)):
        keys = {"speculators_model_type": kind, "sliding_window_non_causal": True}
        keys["sample_from_anchor"] = kind == "dspark"
        check(mask(kind), "speculators", {}, count, **keys)
    check(mask("pard"), "huggingface", {}, pard_token=7, spd_type="pard")


USUAL = {
    "p-eagle": ("speculators", "vllm"),
    "pard": ("huggingface",),
    "dflash": ("z-lab", "speculators"),
    "dspark": ("speculators",),
    "dflash2": ("speculators",),
}


@pytest.mark.parametrize("name", USUAL)
def test_the_default_layout_is_the_first_that_can_express_the_head(name, tmp_path):
    drafter = mask(name)
    assert layouts_of(drafter.head) == USUAL[name]
    saved(drafter, tmp_path / "named", USUAL[name][0])
    drafter.save_pretrained(tmp_path / "usual", verifier="a/b")
    for file in ("config.json", "model.safetensors"):
        named, usual = (tmp_path / folder / file for folder in ("named", "usual"))
        assert named.read_bytes() == usual.read_bytes()


@pytest.mark.parametrize(
    ("flags", "kind"), [({}, LlamaConfig), ({"has_qk_norm": True}, Qwen3Config)]
)
def test_the_speculators_layout_is_a_difference_to_hfs_defaults(flags, kind, tmp_path):
    keys, _ = saved(eagle(**flags), tmp_path, "speculators")
    layers = keys["transformer_layer_config"]
    assert layers["model_type"] == kind.model_type
    filled = kind(**{key: value for key, value in layers.items() if key != "model_type"})
    assert (filled.hidden_size, filled.head_dim, filled.vocab_size) == (HIDDEN, 6, VOCAB)
    assert filled.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize("flags", [{}, {"has_qk_norm": True}, {"attention_bias": True}])
@pytest.mark.parametrize("name", ["pard", "pard, tied"])
@torch.no_grad()
def test_a_saved_language_model_is_one_of_transformers(name, flags, tmp_path):
    drafter = mask(name, **flags)
    drafter.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    text, token = [5, 17, 3, 8, 21, 40], drafter.config.mask_token_id
    expected = model(input_ids=torch.tensor([[*text, token, token]])).logits[0, -3:]
    weights = drafter.head.state_dict()
    tables = [weights["embed_tokens.weight"], None]
    seen = draft_logits(drafter.config, weights, tables, text, None, 3)
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-4)


def test_weights_keep_their_type(tmp_path):
    target = tiny_llama().to(torch.bfloat16)
    head = head_for(target, has_lm_head=False, feature_layers=(1, 4, 7)).to(torch.bfloat16)
    _, tensors = saved(EagleDrafter(head, target), tmp_path)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors["lm_head.weight"].equal(target.lm_head.weight)
    assert "lm_head" in read(tmp_path, target).shared


def test_a_head_whose_ids_are_in_no_order_drafts_alike_when_it_is_loaded(tmp_path):
    head = head_for(TARGET, feature_layers=(1, 4, 7), **FEW_IDS)
    assert (head.target_ids.diff() < 0).any()
    drafter = EagleDrafter(head, TARGET, num_draft_tokens=3)
    drafter.save_pretrained(tmp_path)
    loaded = EagleDrafter.from_pretrained(tmp_path, TARGET, num_draft_tokens=3)
    prompts, drafted = torch.tensor([[5, 17, 3, 41], [8, 60, 13, 2]]), []
    for each in (drafter, loaded):
        options = {"max_new_tokens": 4, "do_sample": True, "seed": 4, "trace": True}
        result = SpeculativeGenerator(TARGET, each).generate(prompts, **options)
        drafted.append([[step.draft_tokens for step in row] for row in result.trace])
    assert drafted[0] == drafted[1]
