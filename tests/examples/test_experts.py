"""How many experts windows touch, beside HF's own router logits and counts by hand."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.experts import expected_experts, expert_costs, main
from specdec import zoo

VOCAB = 96


def mixture(**options):
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=16,
        num_experts_per_tok=3,
        **options,
    )
    return Qwen3MoeForCausalLM(config).eval()


def texts(count, length, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count, length), generator=draws)


@pytest.mark.parametrize("seed", range(4))
def test_a_window_touches_the_experts_that_hf_says(seed):
    """The text is one window, so nothing is left to chance; HF returns its router logits."""
    model, (text,) = mixture(), texts(1, 7, seed)
    found = expert_costs(model, [text], draft_lengths=[6], batch_sizes=[1, 2], draws=5)
    logits = model(text[None], output_router_logits=True).router_logits
    hit = [set(layer.topk(3).indices.flatten().tolist()) for layer in logits]
    assert found.touched[1, 7] == pytest.approx(sum(map(len, hit)) / 3)
    assert found.touched[2, 7] == found.touched[1, 7]  # both rows have the one window there is
    assert found.touched[1, 1] == 3
    assert (found.num_experts, found.per_token) == (16, 3)


def test_of_many_windows_the_mean_is_taken():
    model, rows = mixture(), texts(3, 12)
    found = expert_costs(model, rows, draft_lengths=[3], batch_sizes=[1], draws=4000)
    sizes = []
    for row in rows:
        for layer in model(row[None], output_router_logits=True).router_logits:
            best = layer.topk(3).indices.tolist()
            sizes += [len({e for own in best[i : i + 4] for e in own}) for i in range(9)]
    assert found.touched[1, 4] == pytest.approx(sum(sizes) / len(sizes), abs=0.1)
    assert found.touched[1, 4] - 1 > found.touched[1, 1]  # the control: windows of one token


def test_bytes_are_those_of_the_weights_that_are_read():
    """By hand: an expert has three matrices of 32 x 8; embeddings are read by the line."""
    for tied in (False, True):
        model, (text,) = mixture(tie_word_embeddings=tied), texts(1, 5)
        found = expert_costs(model, [text], draft_lengths=[4], batch_sizes=[1])
        of_expert, table = 4 * 3 * 32 * 8, 4 * VOCAB * 32
        whole = 4 * sum(weight.numel() for weight in model.parameters())
        rest = whole - 3 * 16 * of_expert - (0 if tied else table)
        for window in (1, 5):
            expected = rest + 3 * found.touched[1, window] * of_expert
            assert found.read_bytes[1, window] == pytest.approx(expected)
        assert found.slowdown(4) == found.read_bytes[1, 5] / found.read_bytes[1, 1]
        line = found.records()[1]
        assert (line["num_draft_tokens"], line["slowdown"]) == (4, found.slowdown(4))
        assert f"{found.slowdown(4):.2f}" in str(found)


def test_even_choices_touch_as_many_as_the_formula_says():
    """Random sets of 3 of 16, drawn here."""
    draws, n = torch.Generator().manual_seed(0), 5
    sizes = [
        len({e for _ in range(n) for e in torch.randperm(16, generator=draws)[:3].tolist()})
        for _ in range(4000)
    ]
    assert expected_experts(16, 3, n) == pytest.approx(sum(sizes) / len(sizes), abs=0.1)


def test_what_has_no_experts_or_too_short_texts_is_refused():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts of Hugging Face's"):
        expert_costs(zoo.load_target(), [[1, 2, 3]])
    with pytest.raises(ValueError, match="no text has the 9 tokens of the largest window"):
        expert_costs(mixture(), texts(2, 8))


def test_the_script_counts_in_texts_of_the_target(tmp_path, capsys):
    model, tokenizer = mixture(), zoo.load_tokenizer()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    main(["--target", str(tmp_path), "--draft-lengths", "1", "2", "--max-new-tokens", "4"])
    shown = capsys.readouterr().out
    assert "Of 16 experts of a layer, 3 for each token" in " ".join(shown.split())
    lines = [line.split()[:2] for line in shown.splitlines()]
    assert all([rows, k] in lines for rows in "18" for k in "012")
