"""Medusa: what it drafts is what HF's states and the file's own matrices say; files of both public
layouts; fixed trees by ranks; its loss.
"""

import json

import medusa_heads
import pytest
import torch
from architectures import VOCAB, build
from drafting import ragged_prompts
from eagle_heads import features_and_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from specdec import MedusaDrafter, SpeculativeGenerator, Tree
from specdec.checkpoints import survey_checkpoint
from specdec.checkpoints.families import RECOGNISED
from specdec.drafters import MedusaConfig, MedusaHead
from specdec.lab.cli import main
from specdec.lab.training.medusa import EveryHead, new_head
from specdec.lab.training.optimizer import MuonAdamW
from specdec.loading import load_drafter

MODEL = build("llama")
CHOICES = ((0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 0, 0, 0), (0, 0, 1))


def expected_logits(weights, text, num_blocks=1, num_heads=4):
    """`[J, V]` after a text's last but one token: HF's state there produced the last one."""
    states = features_and_logits(MODEL, torch.tensor([text]), ("final",))[0][0, -2]
    rows = [medusa_heads.predicted(weights, states, i, num_blocks) for i in range(num_heads)]
    return torch.stack(rows)


def drafted(generator, prompt, **options):
    """Texts before each step, and the step's draft tokens."""
    result = generator.generate(
        torch.tensor([prompt]), max_new_tokens=20, eos_token_id=None, trace=True, **options
    )
    text, found = list(prompt), []
    for step in result.trace[0]:
        found.append((list(text), step.draft_tokens))
        text += step.new_tokens
    assert text == result.sequences[0].tolist()
    return found


@pytest.mark.parametrize(("num_blocks", "has_bias"), [(1, True), (2, True), (1, False)])
def test_every_draft_token_is_that_of_the_heads_over_hf_s_state(num_blocks, has_bias):
    head = medusa_heads.head_for(MODEL, num_blocks=num_blocks, has_bias=has_bias)
    weights = medusa_heads.public_names(head)
    generator = SpeculativeGenerator(MODEL, MedusaDrafter(head, MODEL))
    for text, tokens in drafted(generator, [5, 9, 2], do_sample=False):
        logits = expected_logits(weights, text, num_blocks)
        assert tokens == logits.argmax(dim=-1).tolist()[: len(tokens)]


def test_nodes_of_ranks_are_the_tokens_of_these_ranks_at_every_depth():
    head = medusa_heads.head_for(MODEL)
    weights, tree = medusa_heads.public_names(head), Tree(ranks=CHOICES)
    generator = SpeculativeGenerator(MODEL, MedusaDrafter(head, MODEL, tree=tree))
    assert (tree.nodes, tree.depth) == (9, 4)
    for text, tokens in drafted(generator, [5, 9, 2], do_sample=False)[:3]:
        order = expected_logits(weights, text).argsort(dim=-1, descending=True)
        paths = {tuple(order[d, r].item() for d, r in enumerate(path)) for path in CHOICES}
        found, parents = [], tree.shape
        for token, parent in zip(tokens, parents, strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        assert {*found} == paths


@pytest.mark.parametrize("tree", [None, Tree(ranks=CHOICES), "8x3"], ids=str)
@pytest.mark.parametrize("graphs", [False, True])
def test_greedy_texts_are_hf_s_in_ragged_batches(tree, graphs):
    drafter = MedusaDrafter(medusa_heads.informed(MODEL), MODEL, tree=tree)
    generator = SpeculativeGenerator(MODEL, drafter, graphs=graphs)
    prompts = ragged_prompts(VOCAB, 5, 1, 9)
    options = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": False}
    result = generator.generate(*prompts, **options, check=graphs)
    ids, mask = prompts
    for row, kept, found in zip(ids, mask, result.sequences, strict=True):
        own = row[kept.bool()][None]
        ones = {"attention_mask": torch.ones_like(own), "pad_token_id": 0}
        assert found[-30:].equal(MODEL.generate(own, **options, **ones)[0, -30:])
    assert result.stats.acceptance_length > 1.05  # some tokens are accepted: 1.12


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_shape_of_ranks_is_the_same_whatever_the_order_of_its_paths(data):
    paths = data.draw(st.permutations(CHOICES))
    assert Tree(ranks=tuple(paths)).shape == Tree(ranks=CHOICES).shape


SHAPES = {
    "lacks (0,); name it": lambda: Tree(ranks=((0, 0),)),
    r"has \(2,\) and lacks \(1,\)": lambda: Tree(ranks=((0,), (2,))),
    "names a path twice": lambda: Tree(ranks=((0,), (0,))),
    "an empty path": lambda: Tree(ranks=((),)),
    "a rank of Tree.ranks must be": lambda: Tree(ranks=((-1,),)),
    "two shapes": lambda: Tree(nodes=1, depth=1, parents=(-1,), ranks=((0,),)),
    "predicts 4 tokens of a path; num_draft_tokens": lambda: MedusaDrafter(
        medusa_heads.head_for(MODEL), MODEL, 5
    ),
    "predicts 4 tokens of a path; Tree.depth": lambda: MedusaDrafter(
        medusa_heads.head_for(MODEL), MODEL, tree="9x5"
    ),
    "num_blocks must be": lambda: MedusaConfig(1, 0, 4, 4),
    "pass target_ids=None": lambda: MedusaHead(MedusaConfig(1, 1, 4, 4), torch.arange(2)),
}


@pytest.mark.parametrize("words", SHAPES)
def test_what_cannot_be_is_refused(words):
    with pytest.raises(ValueError, match=words.replace("(0,);", r"\(0,\);")):
        SHAPES[words]()


def public_folder(folder, head, file):
    """As FasterDecoding's: a configuration of three keys, which says 2 heads whatever there are."""
    folder.mkdir()
    keys = {"medusa_num_heads": 2, "medusa_num_layers": head.config.num_blocks}
    keys["base_model_name_or_path"] = "lmsys/vicuna-7b-v1.3"
    (folder / "config.json").write_text(json.dumps(keys))
    weights = {name: x.clone() for name, x in medusa_heads.public_names(head).items()}
    if file.endswith(".pt"):
        torch.save(weights, folder / file)
    else:
        save_file(weights, folder / file)


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_public_files_are_read(tmp_path, file, num_blocks):
    head = medusa_heads.head_for(MODEL, num_blocks=num_blocks)
    public_folder(tmp_path / "head", head, file)
    options = {"allow_pickle": True} if file.endswith(".pt") else {}
    survey = survey_checkpoint(tmp_path / "head", MODEL, families=RECOGNISED, **options)
    assert survey.source[:2] == ("FasterDecoding", "Medusa")
    assert survey.unread_keys == ()
    assert any("4 heads, by the tensors" in note for note in survey.notes)
    drafter = MedusaDrafter.from_pretrained(tmp_path / "head", MODEL, tree="6x3", **options)
    assert drafter.config == head.config
    for name, weight in head.state_dict().items():
        assert drafter.head.state_dict()[name].equal(weight), name


def test_a_pickled_file_is_read_only_where_it_is_trusted(tmp_path):
    public_folder(tmp_path / "head", medusa_heads.head_for(MODEL), "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=r"weights in medusa_lm_head.pt: .*allow_pickle=True"):
        MedusaDrafter.from_pretrained(tmp_path / "head", MODEL)


def test_a_head_is_written_as_vllm_reads_it_and_read_back(tmp_path, capsys):
    head = medusa_heads.head_for(MODEL, num_blocks=2)
    MedusaDrafter(head, MODEL).save_pretrained(tmp_path / "head")
    keys = json.loads((tmp_path / "head/config.json").read_text())
    assert keys["architectures"] == ["MedusaModel"]
    assert (keys["num_heads"], keys["medusa_fc_bias"]) == (4, True)
    again = load_drafter(f"medusa:{tmp_path / 'head'}", MODEL, 3)
    assert isinstance(again, MedusaDrafter)
    assert again.config == head.config
    for name, weight in head.state_dict().items():
        assert again.head.state_dict()[name].equal(weight), name
    assert main(["inspect", str(tmp_path / "head")]) == 0
    assert "Medusa" in capsys.readouterr().out


OTHERS = {
    "truncated_vocab_size = 40": {"truncated_vocab_size": 40},
    "original_lm_head = True": {"original_lm_head": True},
    "logit_scale = 0.5": {"logit_scale": 0.5},
}


@pytest.mark.parametrize("words", OTHERS)
def test_files_that_vllm_runs_otherwise_are_refused(tmp_path, words):
    MedusaDrafter(medusa_heads.head_for(MODEL), MODEL).save_pretrained(tmp_path / "head")
    file = tmp_path / "head/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | OTHERS[words]))
    with pytest.raises(ValueError, match=f"not supported: .*{words}"):
        MedusaDrafter.from_pretrained(tmp_path / "head", MODEL)


def test_the_loss_is_the_cross_entropy_of_every_head_with_the_target_s_later_tokens():
    head = medusa_heads.head_for(MODEL)
    ids = torch.randint(1, VOCAB, (3, 12), generator=torch.Generator().manual_seed(1))
    loss = EveryHead(MedusaDrafter(head, MODEL), MODEL, step_weight=0.5)(ids)
    states, logits = features_and_logits(MODEL, ids, ("final",))
    weights, total = medusa_heads.public_names(head), 0.0
    for i in range(4):
        rows = medusa_heads.predicted(weights, states[:, :8], i).log_softmax(dim=-1)
        p = logits[:, 1 + i : 9 + i].softmax(dim=-1)
        total += 0.5**i * -(p * rows).sum(dim=-1).mean()
    torch.testing.assert_close(loss, total / (1 + 0.5 + 0.25 + 0.125))


def test_an_untrained_head_predicts_what_the_target_does_next():
    head, states = new_head(MODEL), torch.randn(2, MODEL.config.hidden_size)
    expected = MODEL.get_output_embeddings()(states)
    for i in range(4):
        torch.testing.assert_close(head(states[:, None])[:, 0, i], expected)


def test_adamw_has_the_vocabulary_matrices_whatever_they_are_called():
    class Named(MedusaHead):
        def __init__(self, config):
            super().__init__(config)
            self.readouts = self.lm_heads
            del self.lm_heads

    optimizer = MuonAdamW(Named(MedusaConfig(2, 1, 8, 9)), lr=0.1, lr_others=0.1)
    assert optimizer.roles == (
        "Muon trains blocks.*.*.weight; AdamW trains blocks.*.*.bias, readouts.*.weight"
    )
