"""Quantised targets: greedy text is HF's own with every drafter, and formats that cannot verify a
draft are refused by name.

torchao, optimum-quanto, bitsandbytes and compressed-tensors are of the environment for quantised
models, see CONTRIBUTING.md; without them the faults are planted into layers of our own.
"""

import pytest
import torch
import torch.nn.functional as F
from architectures import build
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from specdec import SpeculativeGenerator, Target, zoo
from specdec.kernels.linear.reference import scaled_linear
from specdec.lab.zoo import WEIGHTS_DIR
from specdec.targets.edits import fusion

CALL = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
DRAFTERS = ["lookup", "model", "eagle3", "mask-token", "mtp"]
JOINTLY = "activations are quantised over the whole pass"


def loaded(config):
    """As HF quantises while it loads."""
    folder, options = WEIGHTS_DIR / "target", {"dtype": torch.float32, "local_files_only": True}
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, **options
    ).eval()


def torchao(name, **options):
    """As torchao's own function quantises a model in place."""
    quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    model = zoo.load_target()
    quantization.quantize_(model, getattr(quantization, name)(**options))
    return model


def torchao_by_hf():
    quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    return loaded(TorchAoConfig(quantization.Int8WeightOnlyConfig()))


def per_tensor():
    granularity = pytest.importorskip("torchao.quantization", exc_type=ImportError).PerTensor()
    return torchao("Int8DynamicActivationInt8WeightConfig", granularity=granularity)


def quanto(kind):
    pytest.importorskip("optimum.quanto", exc_type=ImportError)
    return loaded(QuantoConfig(kind))


def bitsandbytes(**options):
    pytest.importorskip("bitsandbytes", exc_type=ImportError)
    return loaded(BitsAndBytesConfig(**options))


def compressed(scheme):
    """Weights and activations rounded as compressed-tensors does, with scales of its formula."""
    pytest.importorskip("compressed_tensors", exc_type=ImportError)
    from compressed_tensors import quantization as q
    from compressed_tensors.quantization.utils import calculate_qparams

    model = zoo.load_target()
    groups = {"all": q.preset_name_to_scheme(scheme, ["Linear"])}
    config = {"config_groups": groups, "ignore": ["lm_head"], "quantization_status": "frozen"}
    q.apply_quantization_config(model, q.QuantizationConfig(**config, format="dense"))
    for layer in model.modules():
        if (how := getattr(layer, "quantization_scheme", None)) is None:
            continue
        weight, scale = layer.weight, layer.weight_scale
        size = weight.numel() // scale.numel()  # of a group, a row or everything
        low, high = weight.reshape(-1, size).aminmax(dim=1)
        found, zero = calculate_qparams(low, high, how.weights)
        scale.data.copy_(found.view_as(scale))
        if hasattr(layer, "weight_zero_point"):
            layer.weight_zero_point.data.copy_(zero.view_as(scale))
        if hasattr(layer, "input_scale"):
            layer.input_scale.data.fill_(0.05)
    return model


EXACT = {
    "torchao int8 weights": lambda: torchao("Int8WeightOnlyConfig", version=2),
    "torchao int8 weights, TorchAoConfig": torchao_by_hf,
    "torchao float8 weights": lambda: torchao("Float8WeightOnlyConfig"),
    "torchao int4 weights, unpacked": lambda: torchao(
        "IntxWeightOnlyConfig", weight_dtype=torch.int4
    ),
    "quanto int8": lambda: quanto("int8"),
    "quanto float8": lambda: quanto("float8"),
    "bitsandbytes fp4": lambda: bitsandbytes(load_in_4bit=True),
    "bitsandbytes nf4, doubly": lambda: bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    **{
        f"compressed-tensors {scheme}": lambda scheme=scheme: compressed(scheme)
        for scheme in ("W8A16", "W4A16")
    },
}
ROUNDED = {
    "torchao int8, activations per token": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "bitsandbytes 8 bit, threshold 0": lambda: bitsandbytes(
        load_in_8bit=True, llm_int8_threshold=0.0
    ),
    **{
        f"compressed-tensors {scheme}": lambda scheme=scheme: compressed(scheme)
        for scheme in ("W8A8", "W4A8", "FP8", "FP8_DYNAMIC")
    },
}
"""Activations are quantised: an error of rounding can become a step of one."""
GRAPHS = [name for name in EXACT if name.startswith(("torchao", "compressed"))]
"""torchao 0.17 prints a tensor in its product with activations per token: the host waits."""
CUT_ON_GPUS = [name for name in ROUNDED if name.startswith("compressed")]
"""A product of one row and the same row of a longer product differ in rounding on a GPU, so that
activations are quantised to another step.
"""
REFUSED = {
    "torchao int8, activations per tensor": (per_tensor, JOINTLY),
    "bitsandbytes 8 bit": (lambda: bitsandbytes(load_in_8bit=True), JOINTLY),
    "quanto int4": (lambda: quanto("int4"), "fails under torch.inference_mode"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_text_is_that_of_the_quantised_model_with_every_drafter(name):
    model = EXACT[name]()
    ids = zoo.load_tokenizer()("def main(argv):\n    parser = ", return_tensors="pt").input_ids
    expected = model.generate(ids, do_sample=False, **CALL)
    target = Target(model)
    for drafter in DRAFTERS:
        part = drafter if drafter == "lookup" else zoo.load_drafter(drafter, model)
        generator = SpeculativeGenerator(target, part, graphs=True)
        assert generator.generate(ids, **CALL, check=True).sequences.equal(expected), drafter


@torch.no_grad()
def uncertain_tokens(model, text, num_prompt):
    """Where a text leaves HF's own, which is then continued from there: places, by how much HF's
    logits prefer the other token, and how far they are apart there, computed token by token and in
    a pass over the text.
    """
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    found, start, end = [], num_prompt, text.shape[1]
    while start < end:
        rest = CALL | options | {"max_new_tokens": end - start}
        theirs = model.generate(text[:, :start], **rest)
        others = (theirs.sequences != text)[0].nonzero()
        if not others.numel():
            break
        i = int(others[0])
        logits, whole = theirs.logits[i - start][0], model(text[:, :i]).logits[0, -1]
        gap = logits[theirs.sequences[0, i]] - logits[text[0, i]]
        found.append((i, float(gap), float((logits - whole).abs().max())))
        start = i + 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDED)
def test_text_is_that_of_the_quantised_model_up_to_its_own_rounding(name):
    """Where a token is another one, HF's preference is smaller than what rounding does to it."""
    model = ROUNDED[name]()
    ids = zoo.load_tokenizer()("def main(argv):\n    parser = ", return_tensors="pt").input_ids
    target = Target(model)
    for drafter in DRAFTERS:
        part = drafter if drafter == "lookup" else zoo.load_drafter(drafter, model)
        found = SpeculativeGenerator(target, part, graphs=True).generate(ids, **CALL, check=True)
        for place, gap, apart in uncertain_tokens(model, found.sequences, ids.shape[1]):
            print(f"{name}, {drafter}: token {place}, gap {gap:.3f}, HF apart by {apart:.3f}")
            assert gap < apart


@pytest.mark.parametrize("name", REFUSED)
def test_formats_that_cannot_verify_a_draft_are_refused_by_name(name):
    make, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        Target(make())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_fused_linear_layers_compute_what_those_of_torchao_compute(name):
    model = torchao(name, version=2)
    ids = zoo.load_tokenizer()("def main(argv):\n    ", return_tensors="pt").input_ids
    expected = model.generate(ids, do_sample=False, **CALL)
    (note,) = Target(model).notes
    assert "writes all weights anew" in note
    target = Target(model, fuse=True)
    assert "Linear" in target.notes[0].split(" in ")[1].split(", ")
    for width in (3, 1):
        drafter = zoo.load_drafter("model", model, num_draft_tokens=width)
        assert SpeculativeGenerator(target, drafter).generate(ids, **CALL).sequences.equal(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_captured_steps_are_eager_ones(name, fuse):
    model = EXACT[name]().cuda()
    ids = zoo.load_tokenizer()("def main(argv):\n    ", return_tensors="pt").input_ids.cuda()
    generator = SpeculativeGenerator(Target(model, fuse=fuse), "lookup", graphs=True)
    generator.generate(ids, **CALL, check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUT_ON_GPUS)
def test_activations_whose_steps_depend_on_how_a_text_is_cut_are_refused(name):
    model = ROUNDED[name]().cuda()
    with pytest.raises(ValueError, match="depends on how a text is cut into calls"):
        Target(model)


class RoundedLinear(nn.Linear):
    """Rounds activations to 8 bit, by one scale for each token or for all of them."""

    per_token, counts_versions = True, False

    def forward(self, x):
        """Of a format of a user's own."""
        size = x.abs().amax(dim=-1, keepdim=True) if self.per_token else x.abs().max()
        scale = size.clamp(min=1e-6) / 127
        weight = self.weight.to(x.dtype) / 32
        if self.counts_versions and torch.is_inference_mode_enabled():
            raise RuntimeError("Cannot set version_counter for inference tensor")
        return F.linear((x / scale).round() * scale, weight)


def rounded(dtype, **flags):
    """A model whose output projections round."""
    model = build("llama", dtype=dtype)
    for layer in model.model.layers:
        plain = layer.self_attn.o_proj
        layer.self_attn.o_proj = RoundedLinear(plain.in_features, plain.out_features, bias=False)
        weight = (plain.weight.data * 32 * 4).round().clamp(-127, 127).to(torch.int8)
        layer.self_attn.o_proj.weight = nn.Parameter(weight, requires_grad=False)
        vars(layer.self_attn.o_proj).update(flags)
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_scale_for_all_tokens_is_refused_and_one_for_each_is_not(dtype):
    Target(rounded(dtype))
    with pytest.raises(ValueError, match=rf"o_proj \(RoundedLinear\): {JOINTLY}.*PerRow"):
        Target(rounded(dtype, per_token=False))


def test_fused_layers_multiply_with_bytes_as_they_are(monkeypatch):
    model = build("llama")
    for layer in model.modules():
        if isinstance(layer, nn.Linear):  # as torchao shows a weight, of which these are true
            scale = layer.weight.detach().abs().amax(dim=1, keepdim=True) / 127
            data = (layer.weight.detach() / scale).round().to(torch.int8)
            layer.weight = nn.Parameter(data * scale, requires_grad=False)
            layer.weight.qdata, layer.weight.scale = data, scale
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    expected = model.generate(ids, do_sample=False, **CALL)
    assert "Parameter: every forward writes all weights anew" in Target(model).notes[0]
    calls = []

    def counted(x, weight, *others):
        calls.append(len(weight))
        return scaled_linear(x, weight, *others)

    monkeypatch.setattr(fusion, "scaled_linear", counted)
    monkeypatch.setattr(fusion, "Fused", lambda function, backend: function)
    target = Target(model, fuse=True)
    assert "Linear" in target.notes[0].split(" in ")[1].split(", ")
    calls.clear()
    generator = SpeculativeGenerator(target, "lookup")
    assert generator.generate(ids, **CALL).sequences.equal(expected)
    layer = model.model.layers[0]  # whose siblings are joined: their weights are plain numbers here
    alone = layer.self_attn.o_proj, layer.mlp.down_proj, model.lm_head
    assert set(calls) == {len(m.weight) for m in alone}


def test_a_format_that_fails_under_inference_mode_is_refused_with_its_own_words():
    reason = r"RoundedLinear\) fails under torch.inference_mode, in which .*version_counter"
    with pytest.raises(ValueError, match=reason):
        Target(rounded(torch.float32, counts_versions=True))
