"""What vLLM accepts of a saved head is what the library accepts, position by position.

vLLM lives in an environment of its own, whose Python `VLLM_PYTHON` names (CONTRIBUTING.md). Tiny
random targets and heads, float32, greedy. DSpark files are not run: vLLM 0.32.0 has them in a
runner that needs Triton and a GPU.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from eagle_heads import head_for as eagle_head
from eagle_heads import informed as eagle_informed
from mask_heads import head_for as mask_head
from mask_heads import informed
from medusa_heads import informed as medusa_head
from transformers import AutoModelForCausalLM

from specdec import (
    EagleDrafter,
    MaskTokenDrafter,
    MedusaDrafter,
    MTPDrafter,
    SpeculativeGenerator,
    zoo,
)
from specdec.lab.training.mask_token import with_correction
from specdec.lab.training.mtp import MultiTokenPrediction, new_head

VLLM = os.environ.get("VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VLLM is None, reason="VLLM_PYTHON names no Python of vLLM's environment"),
]
K, NEW_TOKENS, VOCAB = 3, 48, 40
NEWER = {"fc_norm": True, "norm_before_residual": True, "num_layers": 2}
PARALLEL = {"method": "eagle3", "parallel_drafting": True}
HEADS = {
    "eagle 1": ("safeailab", {"kind": "input"}, {"method": "eagle"}),
    "eagle 3": ("safeailab", {}, {"method": "eagle3"}),
    "eagle 3, newer, five features": (
        *("speculators", NEWER | {"feature_layers": (1, 2, 3, 4, 5)}),
        {"method": "eagle3"},
    ),
    "eagle 3, norms of queries and keys": (
        *("speculators", {"has_qk_norm": True, "feedback_norm": True, "draft_vocab_size": 30}),
        {"method": "eagle3"},
    ),
    "p-eagle": ("speculators", {"fc_norm": True, "feature_layers": (1, 4)}, PARALLEL),
    "p-eagle, vllm": ("vllm", {"fc_norm": True, "feature_layers": (1, 2, 3, 5)}, PARALLEL),
    "pard": (
        *("huggingface", {"max_positions": 512, "max_position_embeddings": 512}),
        {"method": "draft_model", "parallel_drafting": True},
    ),
    # vLLM's blocks have K + 1 rows, the library's what the head was trained with: block_size.
    "dflash": ("speculators", {"draft_vocab_size": 30, "block_size": 4}, {"method": "dflash"}),
    "medusa": ("vllm", {"num_blocks": 2}, {"method": "medusa"}),
    "dflash, z-lab": ("z-lab", {"has_lm_head": False, "block_size": 4}, {"method": "dflash"}),
}
"""Layout, flags of the head, and keys of vLLM's `speculative_config`."""
_MOE = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODULES = {
    "MiMo": ("Qwen2", {"hidden_size": 128}),
    "DeepSeek": ("Glm4Moe", _MOE | {"n_shared_experts": 1, "first_k_dense_replace": 1}),
}
"""Architecture of a target, by the layout of its modules."""
ZOO = ("eagle 3, safeailab", "eagle 3, speculators", "mask-token, speculators")
ZOO += ("mask-token, vllm", "draft LM")
NAMES = (*HEADS, *(f"mtp, {name}" for name in MODULES), *(f"zoo, {name}" for name in ZOO))


def new_target(folder: Path, kind: str = "Llama", **changes):
    """A random model whose greedy texts vary, with a shape that vLLM's CPU kernels have."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96}
    ends = {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 512}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")
    model = AutoModelForCausalLM.from_config(
        config(num_hidden_layers=6, **heads | sizes | ends | changes)
    ).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 1.0 if "embed" in name else 0.15)
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def new_drafter(name: str, target):
    """A head that is right often enough to count, where it has a vocabulary head to fit."""
    flags = {"head_dim": 32} | HEADS[name][1]
    if name == "medusa":
        return MedusaDrafter(medusa_head(target, num_heads=K, **HEADS[name][1]), target, K)
    if name.startswith("eagle"):
        layers = {} if "kind" in flags else {"feature_layers": (1, 3, 5)}
        head = eagle_head(target, **layers | flags)
        return EagleDrafter(head if "kind" in flags else eagle_informed(target, head), target, K)
    head = mask_head(target, name.split(",")[0], **{"has_lm_head": True} | flags)
    if name.startswith("dflash"):
        # On a CPU vLLM 0.32.0 norms the context's keys of every layer with the first layer's
        # weights: its rms_norm leaves all rows but one of stacked weights unread.
        for layer in head.layers:
            layer.self_attn.k_norm.weight.data.copy_(head.layers[0].self_attn.k_norm.weight)
    head = informed(target, head, K) if head.config.has_lm_head else head
    return MaskTokenDrafter(head, target, K)


def with_modules(folder: Path, layout: str):
    """A target saved with modules trained a little, as vLLM wires them, and their drafter."""
    kind, sizes = MODULES[layout]
    target = new_target(folder / "plain", kind, **sizes)
    head = new_head(target, layout=layout)
    prompts = torch.randint(VOCAB, (8, 3), generator=torch.Generator().manual_seed(2))
    texts = target.generate(prompts, max_new_tokens=60, do_sample=False)
    drafter = MTPDrafter(head, target, K)
    objective = MultiTokenPrediction(drafter, target)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        objective(texts).backward()
        optimizer.step()
    drafter.save_pretrained(folder / "whole", layout, target)
    wiring = {"feedback_norm": False, "zero_first_embedding": True} if layout == "DeepSeek" else {}
    return target, MTPDrafter.from_pretrained(folder / "whole", target, K, **wiring)


def zoo_drafters(target, folder: Path):
    """The zoo's drafters as vLLM can have them: name, drafter, folder, keys."""
    eagle = zoo.load_drafter("eagle3", target, num_draft_tokens=K)
    mask = zoo.load_drafter("mask-token", target, num_draft_tokens=K)
    mask = MaskTokenDrafter(with_correction(mask.head, None), target, K)  # vLLM has no such Markov
    for name, drafter, layouts, keys in (
        ("eagle 3", eagle, ("safeailab", "speculators"), {"method": "eagle3"}),
        ("mask-token", mask, ("speculators", "vllm"), PARALLEL),
    ):
        for layout in layouts:
            place = folder / f"{name}-{layout}"
            drafter.save_pretrained(place, layout)
            yield f"zoo, {name}, {layout}", drafter, place, keys
    draft = zoo.load_drafter("model", target, num_draft_tokens=K)
    yield "zoo, draft LM", draft, zoo.WEIGHTS_DIR / "draft", {"method": "draft_model"}


def cases(folder: Path):
    """Name, target, drafter, prompts `[B, T]`, folders of target and head, keys."""
    target = new_target(folder / "target")
    prompts = torch.randint(VOCAB, (8, 9), generator=torch.Generator().manual_seed(1))
    for i, (name, (layout, _, keys)) in enumerate(HEADS.items()):
        drafter = new_drafter(name, target)
        drafter.save_pretrained(folder / str(i), layout)
        yield name, target, drafter, prompts, folder / "target", folder / str(i), keys
    for layout in MODULES:
        target, drafter = with_modules(folder / layout, layout)
        whole = folder / layout / "whole"
        yield f"mtp, {layout}", target, drafter, prompts, whole, whole, {"method": "mtp"}
    target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    target.generation_config.eos_token_id = None
    ids = [tokenizer(text)["input_ids"][:40] for text in zoo.heldout_prompts(32)]
    for name, drafter, place, keys in zoo_drafters(target, folder):
        yield name, target, drafter, torch.tensor(ids), zoo.WEIGHTS_DIR / "target", place, keys


def ours(target, drafter, prompts):
    """As vLLM counts: its first token comes from the prompt, without a draft."""
    first = target.generate(prompts, max_new_tokens=1, do_sample=False)
    done = SpeculativeGenerator(target, drafter).generate(
        first, max_new_tokens=NEW_TOKENS - 1, do_sample=False, trace=True
    )
    accepted = [step.num_accepted for row in done.trace for step in row]
    return {
        "tokens": done.sequences[:, prompts.shape[1] :].tolist(),
        "drafts": len(accepted),
        "accepted": [sum(n > i for n in accepted) for i in range(K)],
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """By name: what the library counts of a head, and what vLLM does."""
    names, counts, jobs = [], [], []
    for name, target, drafter, prompts, model, head, keys in cases(tmp_path_factory.mktemp("vllm")):
        names.append(name)
        counts.append(ours(target, drafter, prompts))
        speculative = {"model": str(head), "num_speculative_tokens": K} | keys
        job = {"target": str(model), "speculative_config": speculative}
        jobs.append(job | {"prompts": prompts.tolist(), "max_tokens": NEW_TOKENS})
    assert tuple(names) == NAMES
    done = subprocess.run(
        [VLLM, str(Path(__file__).parent / "serve_vllm.py")],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(names, zip(counts, theirs, strict=True), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_vllm_accepts_of_a_saved_head_what_the_library_does(name, served):
    expected, found = served[name]
    print(f"{name}: {expected['drafts']} {expected['accepted']}; vLLM", *list(found.values())[1:])
    assert expected["accepted"][0] > 0
    assert found == expected
