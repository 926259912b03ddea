"""Every drafter of the library, one of a user's own, and drafters that are always right."""

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import assistants
import eagle_heads
import mask_heads
import medusa_heads
import mtp_heads
import pytest
import torch
from architectures import VOCAB, build
from diagonal import first
from drafting import drawing, perturbed, ragged_prompts
from eagle_heads import FeatureLoop
from eagle_oracle import mtp_oracle, oracle_target
from eagle_oracle import oracle_drafter as eagle_oracle
from plain_loop import PlainLoop
from safetensors.torch import save_file
from toy_mask_token import ToyDrafter, new_head

from specdec import (
    Draft,
    EagleDrafter,
    ExtendedDrafter,
    FirstMatch,
    MaskTokenDrafter,
    MedusaDrafter,
    ModelDrafter,
    MTPDrafter,
    NoDrafter,
    PromptLookupDrafter,
    Recent,
    SelfDrafter,
    Sinks,
    SuffixDrafter,
    Target,
    TopSlots,
    UnoDrafter,
)
from specdec.drafters.assistant import AssistantDrafter, AssistantHead
from specdec.drafters.tree import Tree
from specdec.samplers import LogitsFilter, Noise
from specdec.targets.text import TargetText

GARBAGE = 1e4


class TargetLoop(PlainLoop):
    """A `PlainLoop` whose contexts bring the target's text, and features where they are wanted.

    Args:
        prompts, num_draft_tokens, others: as `PlainLoop`.
        target: with the features of the drafter.
    """

    garbage_feature = torch.nan

    def __init__(self, prompts, num_draft_tokens, target, **others):
        super().__init__(prompts, num_draft_tokens, **others)
        self.target = target

    def context(self):
        """As `PlainLoop`; slots behind the text hold garbage, another one in each context."""
        context, lengths = super().context(), [len(row) - 1 for row in self.rows]
        cache = self.target.init_cache(len(lengths), self.num_in_use)
        for store in cache.stores:
            store.fill_(GARBAGE if self.garbage == -1 else -GARBAGE)
        texts = [torch.tensor(row) for row in self.rows]
        tokens, lengths = torch.nn.utils.rnn.pad_sequence(texts, True), torch.tensor(lengths)
        self.table = self.target.prefill(cache, tokens, lengths, offset=0)
        text = TargetText(self.target, cache, lengths)
        context = replace(context, target=text)
        return context if self.table is None else FeatureLoop.with_features(self, context)


MODEL = build("llama")
ORACLE_TARGET = oracle_target()
CPU = torch.device("cpu")
WIDE = {"hidden_size": 128, "intermediate_size": 256, "has_embed_tokens": True}


def eagle(model=MODEL, **flags):
    """A head that is right often enough, and wrong often enough."""
    return eagle_heads.informed(model, eagle_heads.head_for(model, **flags))


def masks(name, model=MODEL, **flags):
    """A mask-token head of the same kind."""
    sizes = WIDE | {"has_lm_head": True} | flags
    return mask_heads.informed(model, mask_heads.head_for(model, name, **sizes), 4)


def assistant(**flags):
    """One of Gemma 4's kind, right often enough, and wrong often enough."""
    return AssistantHead.of(assistants.assistant_of_plain(MODEL, flags))


CENTROIDS = {"num_centroids": VOCAB, "centroid_intermediate_top_k": 20}
CORRECTED = ["dspark, rnn", "dflash2", "xpress", "lilicorr", "dflash, windows"]
HEADS = {
    "eagle1": lambda: eagle(kind="input", has_lm_head=True, output_norm=True),
    "eagle3": lambda: eagle(**WIDE),
    "eagle3, fewer ids": lambda: eagle(draft_vocab_size=40, **WIDE),
    **{name: lambda name=name: masks(name) for name in mask_heads.ALIGNMENTS},
    "p-eagle, fewer ids": lambda: masks("p-eagle", draft_vocab_size=40),
    **{name: lambda name=name: masks(name) for name in CORRECTED},
    "mtp": lambda: mtp_heads.informed(MODEL),
    "mtp, target's state": lambda: mtp_heads.informed(
        MODEL, semantics="target", zero_first_embedding=True
    ),
    "mtp, looped": lambda: mtp_heads.informed(MODEL, num_depths=1),
    "medusa": lambda: medusa_heads.informed(MODEL),
    "assistant": assistant,
    "assistant, centroids": lambda: assistant(use_ordered_embeddings=True, **CENTROIDS),
    "own": lambda: mtp_heads.randomise(new_head(MODEL), 3),
}
FAMILIES = {"eagle": EagleDrafter, "mtp": MTPDrafter, "assistant": AssistantDrafter}
FAMILIES |= {"medusa": MedusaDrafter, "own": ToyDrafter}
RECURRENT = {f"model, {name}": name for name in ("qwen3_5", "bamba", "mamba")}
"""With attention and gates that are known, and without either: read token by token."""
SELF = {
    "self, recent": lambda: {"visible": Sinks(1) + Recent(3)},
    "self, top": lambda: {"visible": Sinks(1) + TopSlots(2) + Recent(1)},
    "self, layers": lambda: {"layers": (0, 2)},
    "self, exit, recent": lambda: {"layers": 2, "visible": Recent(4)},
    "self, weights, recent": lambda: {"model": perturbed(MODEL), "visible": Recent(6)},
}
"""What is hidden from the target where it drafts for itself."""
JOINED = ["lookup or eagle3", "suffix or mtp or eagle1"]
EXTENDED = "eagle3, then suffix"
WITHOUT_LOGITS = ["lookup", "suffix", "suffix, prompts", *JOINED, EXTENDED]
CHAINS = ["itself", "model", *RECURRENT, *WITHOUT_LOGITS, *HEADS, *SELF, "uno"]
READERS = [n for n in CHAINS if n in SELF or n == "uno" or n.startswith("assistant")]
"""Of the target's keys and values."""
TREE = Tree(nodes=6, depth=3, top_k=2, rates=(0.6, 0.3, 0.2))
WITH_TREES = [
    "model",
    "lookup",
    "eagle3, fewer ids",
    "p-eagle",
    "dflash",
    "dspark, rnn",
    "lilicorr",
    "medusa",
    "assistant",
    "uno",
]
TREES = [f"{name}, tree" for name in WITH_TREES]
PATHS = [f"{name}, paths" for name in ("model", "eagle3, fewer ids", "dspark, rnn")]
DRAFTERS = [*CHAINS, *TREES, *PATHS]
WITH_LOGITS = [name for name in CHAINS if name not in WITHOUT_LOGITS]
ONE_OF_EACH = [
    "model",
    "lookup",
    "suffix",
    JOINED[0],
    EXTENDED,
    "eagle3",
    "p-eagle",
    "dflash",
    "mtp, looped",
    "assistant",
    "own",
    "self, recent",
    "self, top",
]
"""A drafter of every kind, for laws of the loop."""
WAYS = [
    *(
        "model",
        "lookup",
        JOINED[0],
        EXTENDED,
        "eagle3, fewer ids",
        "p-eagle",
        "dspark, rnn",
        "mtp, looped",
    ),
    *("self, top", "model, tree", "dspark, rnn, paths"),
]
OTHERS = "suffix, prompts", "eagle1", "dflash", "assistant", "own", "lookup, tree"
OF_TEXTS = first(DRAFTERS, WAYS)
"""All, for laws of whole texts: by default one of each way to draft is held to them."""
OF_PROPOSALS = first(DRAFTERS, [*WAYS, *OTHERS])
"""The same for laws of single proposals, 9 and 13, which cost less."""

head_of = cache(lambda name: HEADS[name]())
recurrent = cache(build)
own_target = cache(lambda: Target(MODEL))


def written(folder, model, *parts):
    """An adapter of random weights as PEFT writes it, of the layers whose names end so."""
    generator = torch.Generator().manual_seed(5)
    layers = {n: m for n, m in model.named_modules() if n.endswith(parts)}
    shapes = {f"{n}.lora_A": (3, m.in_features) for n, m in layers.items()}
    shapes |= {f"{n}.lora_B": (m.out_features, 3) for n, m in layers.items()}
    weights = {
        f"base_model.model.{n}.weight": 0.3 * torch.randn(shape, generator=generator)
        for n, shape in shapes.items()
    }
    save_file(weights, folder / "adapter_model.safetensors")
    keys = {"peft_type": "LORA", "r": 3, "lora_alpha": 4, "target_modules": list(parts)}
    (folder / "adapter_config.json").write_text(json.dumps(keys))
    return folder


@cache
def adapter():
    """One for `MODEL`."""
    parts = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"
    return written(Path(mkdtemp()), MODEL, *parts)


@torch.inference_mode(False)  # what is built is kept for other tests
def make(name, num_draft_tokens=4, **options):
    """A drafter of the table for `MODEL`."""
    if name in TREES:
        if name == "lookup, tree":
            return PromptLookupDrafter(6, max_ngram=2, num_continuations=2)
        return make(name.removesuffix(", tree"), tree=TREE, **options)
    if name in PATHS:
        return make(name.removesuffix(", paths"), tree="2x3 paths", **options)
    if name in JOINED:
        first, *others = name.split(" or ")
        shorter = max(num_draft_tokens - len(others) + 1, 1)
        return FirstMatch(
            make(first, shorter), *(make(other, num_draft_tokens) for other in others)
        )
    if name == EXTENDED:
        head = make("eagle3", -(-num_draft_tokens // 2))
        return ExtendedDrafter(head, remembering(max(num_draft_tokens // 2, 1)))
    if name == "lookup":
        return PromptLookupDrafter(num_draft_tokens, max_ngram=2)
    if name in SELF:
        return SelfDrafter(own_target(), num_draft_tokens, **SELF[name](), **options)
    if name == "uno":
        pytest.importorskip("peft")
        return UnoDrafter(own_target(), adapter(), num_draft_tokens, mask_token_id=50, **options)
    if name.startswith("suffix"):
        return remembering(num_draft_tokens, with_prompts="prompts" in name)
    if name in HEADS:
        found = (family for start, family in FAMILIES.items() if name.startswith(start))
        family = next(found, MaskTokenDrafter)
        return family(head_of(name), MODEL, num_draft_tokens, **options)
    if name in RECURRENT:
        return ModelDrafter(recurrent(RECURRENT[name]), num_draft_tokens, **options)
    return ModelDrafter(
        MODEL if name == "itself" else perturbed(MODEL), num_draft_tokens, **options
    )


def remembering(num_draft_tokens, with_prompts=False):
    """A suffix drafter that remembers texts, some of them of few ids; with prompts besides one for
    every second id that a row may begin with, and one for some of their second ids.
    """
    drafter = SuffixDrafter(num_draft_tokens, max_tokens=2400 if with_prompts else 400)
    generator, sizes = torch.Generator().manual_seed(0), ((6, 100), (6, 30), (VOCAB, 300))
    drafter.remember([torch.randint(most, (n,), generator=generator) for most, n in sizes])
    if with_prompts:
        prompts = [[a] for a in range(0, VOCAB, 2)] + [[0, a] for a in range(VOCAB)]
        drafter.remember(torch.randint(6, (len(prompts), 10), generator=generator), prompts)
    return drafter


# A drafter at work without a target.


def loop_of(drafter, prompts, seed=0, *, hidden_size=32, dtype=torch.float32, **others):
    """The loop as the drafter sees it, with random features where it reads any."""
    width, layers = drafter.num_draft_tokens, drafter.feature_layers
    others["depth"] = drafter.tree_depth
    if drafter.reads_target:
        return TargetLoop(prompts, width, own_target().with_features(layers), **others)
    if not layers:
        return PlainLoop(prompts, width, **others)
    generator = torch.Generator().manual_seed(seed)
    shape = len(prompts), 60, len(layers) * hidden_size
    table = torch.randn(shape, generator=generator, dtype=dtype)
    return eagle_heads.FeatureLoop(prompts, width, table, **others)


def fresh_state(drafter, rows, vocab_size=VOCAB):
    """A state for texts of at most 60 tokens."""
    return drafter.init_state(rows, 60, vocab_size=vocab_size, device=CPU)


def propose(drafter, loop, state, logits_filter, *, count=None, context=None, rows=None):
    """The next draft of a loop, and its noise, which depends on rows and positions alone. Of no
    tokens it is what the loop makes of it: one is drafted and dropped.
    """
    rows = list(range(len(loop.rows))) if rows is None else rows
    count = drafter.num_draft_tokens if count is None else count
    starts = torch.tensor([len(row) - 1 for row in loop.rows])
    noise = Noise(rows).at(starts, max(count, 1) + 1)
    told = drawing(drafter, LogitsFilter(len(rows), **logits_filter), noise)
    told = replace(told, num_draft_tokens=max(count, 1))
    context = loop.context() if context is None else context
    with loop.narrowed(state):
        return drafter.propose(context, state, told), noise


def is_valid(draft):
    """`[B, K]` bool: tokens that a row proposes."""
    offsets = torch.arange(draft.tokens.shape[1])
    if draft.num_valid is None:
        return torch.ones_like(draft.tokens, dtype=torch.bool)
    return offsets < draft.num_valid[:, None]


def random_texts(seed, most):
    """Three prompts of ids up to `most`, one of which has one token, and a source of numbers."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    prompts = [[integer(0, most) for _ in range(integer(2, 9))] for _ in range(3)]
    prompts[seed % 3] = prompts[seed % 3][:1]
    return prompts, integer


def commit_some(loop, draft, count, integer, most):
    """An accepted path of each row and one token more; one row has ended."""
    new = []
    for row, valid in enumerate(is_valid(draft).sum(1).tolist()):
        last, path = integer(0, min(valid, count)) - 1, []
        while last >= 0:
            path.insert(0, int(draft.tokens[row, last]))
            last = int(draft.window_parents[row, last]) - 1
        new.append([*path, integer(0, most)])
    new[integer(0, 2)] = []
    loop.commit(new)


def drive(drafter, seed, *, vocab_size, chunk_size=4, num_steps=4, logits_filter=None, **sizes):
    """Yields (loop, draft, noise) of every proposal over random texts; what belongs to no row is
    NaN or an impossible id.
    """
    prompts, integer = random_texts(seed, vocab_size - 1)
    sizes |= {"garbage": -1 - 1000 * integer(0, 1), "slack": integer(0, 9)}
    loop, state = loop_of(drafter, prompts, seed, **sizes), fresh_state(drafter, 3, vocab_size)
    loop.prefill(drafter, state, chunk_size)
    for _ in range(num_steps):
        draft, noise = propose(drafter, loop, state, logits_filter or {})
        yield loop, draft, noise
        commit_some(loop, draft, drafter.num_draft_tokens, integer, vocab_size - 1)


# Drafters that are always right.

MOST = 3
ROOM, LEARNED = 60, 24  # new tokens of a text, and how many of them heads know by heart
IDS, MASK = ragged_prompts(VOCAB, 8, 5)
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@cache
def texts():
    """HF's greedy texts after the prompts, without their padding."""
    found = MODEL.generate(IDS, attention_mask=MASK, max_new_tokens=ROOM + MOST, **GREEDY)
    return [found[0], found[1, 3:]]


class Scribe(NoDrafter):
    """Knows how the greedy text goes on, but only while it was shown every token of the text. Its
    state `[B, S]` is one more than each token that it was shown.
    """

    num_draft_tokens = MOST

    def init_state(self, batch_size, max_length, *, vocab_size, device):
        return torch.zeros(batch_size, max_length + 1, dtype=torch.long)

    def prefill(self, context, shown):
        offsets = torch.arange(context.tokens.shape[1])
        is_real = offsets <= context.num_new[:, None]
        slots = (context.start[:, None] + offsets).where(is_real, torch.tensor(-1))
        shown.scatter_(1, slots % shown.shape[1], context.tokens + 1)

    def propose(self, context, shown, drawing):
        self.prefill(context, shown)
        text = torch.nn.utils.rnn.pad_sequence(texts(), batch_first=True)
        count, steps = context.num_committed[:, None], torch.arange(drawing.num_draft_tokens)
        positions = torch.arange(text.shape[1])
        is_equal = shown[:, : text.shape[1]] == text[:, : shown.shape[1]] + 1
        knows = (is_equal | (positions >= count)).all(dim=1, keepdim=True)
        return Draft((text.gather(1, count + steps) + ~knows) % VOCAB)


@cache
def _by_heart(name):
    rows = [row[: len(row) - ROOM + LEARNED] for row in texts()]
    return mask_heads.learned(MODEL, name, MOST, rows)


def _joined(names):
    """Of heads that read different layers the first one drafts; n-grams are never found."""
    heads = [ORACLES[name]()[1] for name in names]
    return FirstMatch(PromptLookupDrafter(MOST, min_ngram=50, max_ngram=50), *heads)


def _assistant_by_heart():
    plain = assistants.assistant_of_plain(MODEL, {}, hidden_size=640, intermediate_size=640)
    return AssistantHead.of(assistants.learn(plain, MODEL, texts(), MOST))


ORACLES = {
    "itself": lambda: (MODEL, ModelDrafter(MODEL, MOST)),
    **{
        name: lambda model=model: (recurrent(model), ModelDrafter(recurrent(model), MOST))
        for name, model in RECURRENT.items()
    },
    "scribe": lambda: (MODEL, Scribe()),
    "self": lambda: (MODEL, SelfDrafter(MODEL, MOST)),
    "self, all recent": lambda: (MODEL, SelfDrafter(MODEL, MOST, visible=Sinks(4) + Recent(80))),
    "self, all top": lambda: (MODEL, SelfDrafter(MODEL, MOST, visible=TopSlots(70))),
    "self, copied weights": lambda: (
        MODEL,
        SelfDrafter(MODEL, MOST, model=copy.deepcopy(MODEL), visible=Recent(90)),
    ),
    "eagle1": lambda: (ORACLE_TARGET, eagle_oracle(ORACLE_TARGET, "eagle1", MOST)),
    "eagle3": lambda: (ORACLE_TARGET, eagle_oracle(ORACLE_TARGET, "eagle3", MOST)),
    "mtp": lambda: (ORACLE_TARGET, mtp_oracle(ORACLE_TARGET, "chain", 2, MOST)),
    "mtp, target's state": lambda: (ORACLE_TARGET, mtp_oracle(ORACLE_TARGET, "target", 4, MOST)),
    "mtp, looped": lambda: (ORACLE_TARGET, mtp_oracle(ORACLE_TARGET, "chain", 1, MOST)),
    "assistant": lambda: (MODEL, AssistantDrafter(_assistant_by_heart(), MODEL, MOST)),
    "joined, eagle1": lambda: (ORACLE_TARGET, _joined(["eagle1", "mtp", "eagle3"])),
    "joined, mtp": lambda: (ORACLE_TARGET, _joined(["mtp", "eagle3", "eagle1"])),
    **{
        name: lambda name=name: (MODEL, MaskTokenDrafter(_by_heart(name), MODEL, MOST))
        for name in mask_heads.ALIGNMENTS
    },
}
"""Target and drafter, by name. Those of `MODEL` but itself know its greedy text only."""
