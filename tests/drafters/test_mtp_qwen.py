"""The prediction modules of Qwen3-Next and Qwen3.5 draft for their own targets, which remember.

Two references, both without a cache. One is written here, from the wiring in vLLM's
`qwen3_next_mtp.py` and `qwen3_5_mtp.py` and the published names of tensors, around HF's decoder
layer. The other is HF's own `MtpModel`, which reads `mtp.*` files. HF does not run it for
these families: their configurations lack `num_mtp_layers`, and `generate(use_mtp=True)` refuses
stateful models. So here it is given the two fields of configuration, and called directly.
"""

import pytest
import torch
import transformers
from architectures import RECURRENT, build
from diagonal import first
from drafting import ragged_prompts
from mtp_checkpoints import eager, edit_config, run_layer, write_mtp_names
from safetensors.torch import save_file

from specdec import MTPDrafter, SpeculativeGenerator
from specdec.checkpoints import hf_layers, survey_checkpoint
from specdec.checkpoints.mtp import MTP
from specdec.drafters.head.causal import attend_causally
from specdec.drafters.head.hf_layer import HFLayerConfig
from specdec.drafters.head.window import Pass

VOCAB, NUM_NEW = 5, 14
IDS, MASK = ragged_prompts(VOCAB, 9, 1, 6, 4)
LENGTHS = MASK.sum(dim=1).tolist()
KINDS = ["linear_attention"] * 3 + ["full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
MELLUM = getattr(transformers, "MellumConfig", None)
READS_FC = hasattr(MELLUM, "num_mtp_layers")  # of 5.17, a Mellum without prediction modules
FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5 with a tower")
QUICK = ("qwen3_next", "qwen3_5 with a tower")


class Case:
    """A target from a folder, with what is in its file."""

    def __init__(self, folder, family, *, seed=3):
        self.folder, self.family = folder, family
        name = family.split()[0]
        rope = ROPE if name == "qwen3_next" else ROPE | MROPE
        changes = {"vocab_size": VOCAB, "head_dim": 16, "rope_parameters": rope}
        changes["layer_types"] = KINDS
        if "tower" in family:  # as deep as the language model
            vision = {"depth": 4, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
            vision |= {"out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16}
            text = RECURRENT[name][1] | changes
            config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
            torch.manual_seed(seed)
            model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(0, 0.15)
        else:
            model = build(name, seed=seed, **changes)
        layers = model.get_decoder().layers
        torch.manual_seed(seed)
        self.layer = type(layers[3])(eager(model.config.get_text_config()), 3).eval()
        self.tensors = write_mtp_names(folder, model, self.layer, seed=seed)
        if name != "qwen3_next":
            text = model.config.get_text_config().to_dict() | {"mtp_num_hidden_layers": 1}
            edit_config(folder, **({"text_config": text} if "tower" in family else text))
        kind = getattr(transformers, type(model).__name__)
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()

    def drafter(self, num_draft_tokens=3, **options):
        return MTPDrafter.from_pretrained(self.folder, self.model, num_draft_tokens, **options)

    @torch.no_grad()
    def final(self, ids):
        """The target's states `[N, H]` of a text, after its final norm."""
        return self.model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def greedy(self, ids):
        text = ids[None]
        options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
        return self.model.generate(text, attention_mask=torch.ones_like(text), **options)[0]


@pytest.fixture(scope="module", name="case", params=first(FAMILIES, QUICK))
def _case(request, tmp_path_factory):
    return Case(tmp_path_factory.mktemp("qwen"), request.param)


# The wiring, written once more.


def centred(x, weight):
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + weight)


@torch.no_grad()
def published(case, embeds, hidden):
    """What a module hands on over a whole text, `[N, H]`; logits are the target's head of it."""
    weights = {n.removeprefix("mtp."): t for n, t in case.tensors.items() if n.startswith("mtp.")}
    pair = zip((embeds, hidden), ("pre_fc_norm_embedding", "pre_fc_norm_hidden"), strict=True)
    x = torch.cat([centred(x, weights[f"{name}.weight"]) for x, name in pair], dim=-1)
    x = run_layer(case.model, case.layer, 3, (x @ weights["fc.weight"].T)[None])[0]
    return centred(x, weights["norm.weight"])


@torch.no_grad()
def drafted(case, text, count):
    """Greedy draft tokens after a text: the module reads its own output from the second on."""
    embed = case.model.get_input_embeddings()
    hidden, text, found = case.final(text[:-1]), text.clone(), []
    for _ in range(count):
        out = published(case, embed(text[1:]), hidden)
        found.append(int(case.model.lm_head(out[-1]).argmax()))
        text = torch.cat([text, torch.tensor(found[-1:])])
        hidden = torch.cat([hidden, out[-1:]])
    return found


@torch.no_grad()
def logits_of_head(case, head, text, borrowed):
    """`[N, V]` of a head over a whole text, without a cache."""
    table = head.config.layer.rotary_table(len(text) - 1, dtype=torch.float32)
    step = Pass(table[None, None], attend_causally, torch.arange(len(text) - 1)[None])
    embeds = case.model.get_input_embeddings()(text[1:])[None]
    feature = case.final(text[:-1])[None]
    return head.logits(0, head(0, embeds, feature, step), borrowed)[0]


@torch.no_grad()
def published_logits(case, text):
    embeds = case.model.get_input_embeddings()(text[1:])
    return case.model.lm_head(published(case, embeds, case.final(text[:-1])))


@torch.no_grad()
def logits_of_hf(case, text):
    """`[N, V]` of HF's own module, read from the same folder."""
    from transformers.modeling_layers import MtpModel

    config = case.model.config.get_text_config()
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    try:
        module = MtpModel.from_pretrained(case.model).eval()
    finally:
        del config.num_mtp_layers, config.mtp_layer_types
    positions = torch.arange(1, len(text))[None]
    hidden = case.final(text[:-1])[None]
    out = module.forward_layer(0, hidden, positions, None, input_ids=text[None, 1:])
    return case.model.lm_head(out)[0]


# What is compared.


def traced(case, drafter, row):
    """Of one row: its text, and each draft beside that of the published wiring."""
    length, generator = LENGTHS[row], SpeculativeGenerator(case.model, drafter)
    result = generator.generate(IDS[row : row + 1, -length:], max_new_tokens=NUM_NEW, trace=True)
    text, pairs = result.sequences[0], []
    for step in result.trace[0]:
        if length > 1 and step.draft_tokens:
            count = len(step.draft_tokens)
            pairs.append((step.draft_tokens, drafted(case, text[:length], count)))
        length += step.num_accepted + 1
    return text, pairs


def is_published(case, drafter):
    """Whether a drafter's logits and drafts are those of the published wiring."""
    text = case.greedy(IDS[0])
    logits = logits_of_head(case, drafter.head, text, case.model.lm_head)
    assert logits.std() > 0.1
    if not torch.allclose(logits, published_logits(case, text), rtol=0, atol=2e-5):
        return False
    pairs = traced(case, drafter, 0)[1]
    assert len(pairs) > 3
    return all(ours == theirs for ours, theirs in pairs)


def test_text_is_hfs_and_drafts_are_those_of_the_published_wiring(case):
    drafter = case.drafter()
    generator = SpeculativeGenerator(case.model, drafter, prefill_chunk_size=4)
    result = generator.generate(IDS, MASK, max_new_tokens=NUM_NEW, trace=True)
    for row, length in enumerate(LENGTHS):
        greedy = case.greedy(IDS[row, -length:])
        assert result.sequences[row, -length - NUM_NEW :].equal(greedy)
        text, pairs = traced(case, drafter, row)
        assert text.equal(greedy)
        assert all(ours == theirs for ours, theirs in pairs)
        in_batch = [step.draft_tokens for step in result.trace[row] if step.draft_tokens]
        assert in_batch[-len(pairs) :] == [ours for ours, _ in pairs]
    assert 0.05 < result.stats.acceptance_rate < 0.95


def layer_of(index):
    """Modules built as another layer of the target."""
    of = HFLayerConfig.of
    return lambda model, *, like: of(model, like=index)


def test_mistakes_show(case, monkeypatch):
    assert is_published(case, case.drafter())
    for wrong in (
        {"hidden_first": True},
        {"feature_layers": (4,)},  # before the target's final norm
        {"feedback_norm": False},
        {"zero_first_embedding": True},
    ):
        assert not is_published(case, case.drafter(**wrong)), wrong
    with monkeypatch.context() as patch:
        patch.setattr(hf_layers, "has_centred_norms", lambda model: False)
        assert not is_published(case, case.drafter())
    monkeypatch.setattr(HFLayerConfig, "of", layer_of(0))
    with pytest.raises(ValueError, match=r"linear_attn\..*missing|missing.*linear_attn\."):
        case.drafter()


@pytest.mark.skipif(not READS_FC, reason="HF's MtpModel reads mtp.fc since Mellum has modules")
def test_logits_are_those_of_hfs_module_which_it_does_not_run_itself(case):
    text = case.greedy(IDS[0])
    logits = logits_of_head(case, case.drafter().head, text, case.model.lm_head)
    torch.testing.assert_close(logits, logits_of_hf(case, text), rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="not supported with stateful models"):
        case.model.generate(text[None], use_mtp=True, max_new_tokens=2)


def test_a_file_is_read_without_its_target_and_whatever_its_experts_are_stored_as(case, tmp_path):
    """Qwen3-Next stores experts one by one, Qwen3.5 in one tensor."""
    stored = case.drafter().head.state_dict()
    for folder in (case.folder, tmp_path):
        survey = survey_checkpoint(folder, families=(MTP,))
        assert survey.source.producer == "Qwen"
        assert not survey.faults
        assert not survey.unread_keys
        head = survey.load().build().state_dict()
        assert head.keys() == stored.keys()
        assert all(head[name].equal(tensor) for name, tensor in stored.items())
        fused = {name: t for name, t in case.tensors.items() if ".experts." not in name}
        for name, tensor in stored.items():
            if ".experts." in name:
                fused[name.replace("layers.0.block.layer.", "mtp.layers.0.")] = tensor
        save_file(fused, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text((case.folder / "config.json").read_text())


def test_tables_of_its_own_are_read_and_what_is_unknown_is_told(tmp_path):
    case = Case(tmp_path, "qwen3_5")
    own = {"mtp.embed_tokens.weight": torch.randn(VOCAB, 32)}
    own["mtp.lm_head.weight"] = torch.randn(VOCAB, 32)
    save_file(case.tensors | own, tmp_path / "model.safetensors", metadata={"format": "pt"})
    head = case.drafter().head
    assert head.embed_tokens.weight.equal(own["mtp.embed_tokens.weight"])
    assert head.lm_head.weight.equal(own["mtp.lm_head.weight"])
    with pytest.raises(ValueError, match="a vocabulary of 5, but GPT2LMHeadModel has 61"):
        MTPDrafter.from_pretrained(tmp_path, build("gpt2"))
    own = {"mtp.fc_2.weight": torch.ones(2)}
    save_file(case.tensors | own, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected .*fc_2\.weight"):
        case.drafter()
