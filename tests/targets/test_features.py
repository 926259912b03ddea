"""A target's features are the hidden states of HF's plain forward, each of them.

HF's `output_hidden_states` is the oracle for hidden states 0..L-1, and for `"final"`, which it
lists last; number L, before the final norm, is caught by a hook on the last decoder layer. Rows
are ragged, rejected drafts lie in the cache, and verification continues what prefill has read.
"""

import copy
import re

import pytest
import torch
from architectures import VOCAB, build
from drafting import ragged_prompts, to_right_padding
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from specdec import SpeculativeGenerator, Target
from specdec.drafters import NoDrafter
from specdec.types import Draft, Queries

NAMES = ["llama", "gpt2", "gemma3", "opt", "gptj", "falcon_gqa", "mpt", "gpt_oss", "deepseek_v3"]
LENGTHS = [3, 11, 7]
"""Of the texts; what is read at first is less."""
NUM_READ = torch.tensor([1, 8, 4])
IDS, MASK = to_right_padding(*ragged_prompts(VOCAB, *LENGTHS))


def plain_features(model, ids: Tensor) -> dict[int | str, Tensor]:
    """`[1, T, H]` of every hidden state, from one plain forward over an unpadded text."""
    caught = []
    last = next(m for m in model.modules() if isinstance(m, nn.ModuleList))[-1]
    handle = last.register_forward_hook(lambda _, args, out: caught.append(out))
    with torch.no_grad():
        states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    handle.remove()
    out = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
    count = len(states) - 1
    features = dict(enumerate(states[:count])) | {"final": states[-1]}
    return features | {count: out.view_as(states[0])}


def expected_features(model, layers) -> list[Tensor]:
    """Per row `[T, F]`, T its length."""
    rows = []
    for ids, length in zip(IDS, LENGTHS, strict=True):
        features = plain_features(model, ids[None, :length])
        rows.append(torch.cat([features[layer][0] for layer in layers], dim=-1))
    return rows


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return build(request.param)


@pytest.mark.parametrize("chunk_size", [8, 3])
@torch.no_grad()
def test_features_of_prefill_and_verification_are_hfs_hidden_states(model, chunk_size):
    num_layers = model.config.num_hidden_layers
    layers = (0, 2, num_layers, "final")
    target = Target(model, feature_layers=layers)
    expected = expected_features(model, layers)
    assert target.feature_width == 4 * 32 == expected[0].shape[-1]

    cache = target.init_cache(len(LENGTHS), 32)
    for offset in range(0, 8, chunk_size):
        tokens = IDS[:, offset : min(8, offset + chunk_size)]
        features = target.prefill(cache, tokens, NUM_READ, offset=offset)
        for row, count in enumerate(NUM_READ.tolist()):
            seen = features[row, : max(0, count - offset)]
            wanted = expected[row][offset : min(count, offset + chunk_size)]
            torch.testing.assert_close(seen, wanted, atol=1e-5, rtol=1e-5)
    root, *right = IDS.gather(1, NUM_READ[:, None] + torch.arange(3)).T
    for tokens in (torch.full((3, 2), 5), torch.stack(right, dim=1)):  # the first are rejected
        features = target.verify(cache, NUM_READ, root, Draft(tokens)).features
    for row, count in enumerate(NUM_READ.tolist()):
        wanted = expected[row][count : count + 3]
        seen = features[row, : len(wanted)]
        assert len(wanted) >= 2
        torch.testing.assert_close(seen, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "granite", "opt"])
@torch.no_grad()
def test_queries_times_keys_of_the_cache_are_hfs_attention(name):
    """Through softmax, which hides neither a scale nor a position; up to the last token's text,
    which the sliding windows of these layers do not cut.
    """
    model, length = build(name), 6
    last = model.config.num_hidden_layers - 1
    target = Target(model, feature_layers=(Queries(0), "final", Queries(last)))
    cache = target.init_cache(1, 32)
    ids = IDS[1:2, :length]
    features = target.prefill(cache, ids, torch.tensor([length]), offset=0)
    widths = target.feature_widths(target.feature_layers)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    expected = eager(ids, output_attentions=True).attentions
    pieces = features.split(widths, dim=2)
    for layer, queries in ((0, pieces[0]), (last, pieces[2])):
        keys = cache.keys[layer][:, :length].transpose(1, 2)  # [1, h, T, D]
        heads = model.config.num_attention_heads
        queries = queries.unflatten(2, (heads, -1)).transpose(1, 2)
        keys = keys.repeat_interleave(heads // keys.shape[1], dim=1)
        seen = (queries @ keys.transpose(2, 3))[:, :, -1].softmax(dim=-1)
        torch.testing.assert_close(seen, expected[layer][:, :, -1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layer", [4, -1, "last", 1.0, None, Queries(3)])
def test_a_feature_layer_that_does_not_exist_is_refused(layer):
    with pytest.raises(
        ValueError, match=rf"{re.escape(repr(layer))} does not exist: .*'final' or .* 0\.\.3"
    ):
        Target(build("llama"), feature_layers=(0, layer))
    with pytest.raises(TypeError, match="feature_layers"):
        Target(build("llama"), feature_layers="final")


class Watcher(NoDrafter):
    """Writes down the features that it is given beside the tokens that they produced."""

    num_draft_tokens = 1  # a drafter of none is not called

    def __init__(self, feature_layers: tuple):
        super().__init__()
        self.feature_layers = feature_layers
        self.seen: list[dict[int, tuple[int, Tensor]]] = [{} for _ in LENGTHS]

    def prefill(self, context, state):
        for row, seen in enumerate(self.seen):
            for j in range(int(context.num_new[row])):
                token = int(context.tokens[row, j + 1])
                seen[int(context.start[row]) + j] = token, context.features[row, j].clone()

    def propose(self, context, state, drawing):
        self.prefill(context, state)
        return Draft(context.tokens[:, :1], None, torch.zeros_like(context.start))


def test_a_drafter_sees_each_state_once_beside_the_token_that_it_produced(model):
    layers = (1, "final")
    watcher = Watcher(layers)
    generator = SpeculativeGenerator(model, watcher, prefill_chunk_size=4)
    result = generator.generate(IDS, MASK, max_new_tokens=6)
    for row, length in enumerate(LENGTHS):
        text = torch.cat([IDS[row, :length], result.new_tokens[row]])
        features = plain_features(model, text[None])
        wanted = torch.cat([features[layer][0] for layer in layers], dim=-1)
        # The last step has emitted a token that no proposal has been asked to follow.
        assert sorted(watcher.seen[row]) == list(range(length + 6 - 2))
        for position, (token, feature) in watcher.seen[row].items():
            assert token == text[position + 1]
            torch.testing.assert_close(feature, wanted[position], atol=1e-5, rtol=1e-5)


class HeadTokens(TorchFunctionMode):
    """Counts the tokens that linear layers over some weight are given."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight, self.counts = weight, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "linear" and args[1] is self.weight:
            self.counts.append(args[0].shape[:-1].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [(), (1, "final")])
def test_reading_a_prompt_leaves_the_vocabulary_head_alone_unless_somebody_watches_it(layers):
    model, seen = build("llama"), []
    target = Target(model, feature_layers=layers)
    cache, read = target.init_cache(len(IDS), 32), (IDS[:, :8], NUM_READ)
    with HeadTokens(model.lm_head.weight) as head:
        alone = target.prefill(cache, *read, offset=0)
    assert sum(head.counts) == 0
    handle = model.lm_head.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    with HeadTokens(model.lm_head.weight) as head:
        watched = target.prefill(cache, *read, offset=0)
    handle.remove()
    assert seen == [(len(IDS), 1, VOCAB)]
    assert head.counts == [len(IDS)]
    assert alone is watched is None if not layers else torch.equal(alone, watched)


def test_features_of_layers_that_share_keys_are_those_of_all_tokens():
    """Gemma 4 runs such layers for the last tokens only where nobody asks for more."""
    kinds = ["sliding_attention", "full_attention"] * 3
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "global_head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size_per_layer_input": 8}
    sizes |= {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "sliding_window": 8}
    config = AutoConfig.for_model(
        "gemma4_text", num_hidden_layers=6, num_kv_shared_layers=2, layer_types=kinds, **sizes
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    layers = (2, 5, 6, "final")
    target = Target(model, feature_layers=layers)
    ids = IDS[1:2, :9]
    found = target.prefill(target.init_cache(1, 32), ids, torch.tensor([9]), offset=0)
    expected = plain_features(model, ids)
    torch.testing.assert_close(found, torch.cat([expected[layer] for layer in layers], dim=-1))
