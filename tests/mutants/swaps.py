"""Functions of the package and faulty ones in their place, which get the right one first."""

from collections.abc import Callable
from dataclasses import replace

from mutation import Fault, Swap

SWAPS: list[Fault] = []
_LAWS = "drafters/test_laws.py::test_{}".format
_CACHE = "targets/test_slot_cache.py::TestCacheAgainstLists"
_RIGHT = _LAWS("a_drafter_that_is_always_right_is_never_rejected")
_TREE = "greedy_text_is_that_of_hf_and_a_target_that_drafts_for_itself_is_never_rejected"


def instead_of(where: str, name: str, caught_by: str) -> Callable:
    """Adds a fault: the decorated function in the place of the one at `where`."""

    def add(faulty: Callable) -> Callable:
        def faulty_of(right):
            return lambda *args, **options: faulty(right, *args, **options)

        SWAPS.append(Fault(name, caught_by, Swap(where, faulty_of)))
        return faulty

    return add


# What is drawn.


@instead_of(
    "kernels.truncate.cutoff:drop_below",
    "top-p counts the tokens that top-k has removed (sglang test_eagle_sampling_filters.py)",
    "test_filter.py::test_a_filter_is_the_warpers_of_huggingface_with_one_value_per_row",
)
def _(right, scaled, cutoff):
    return scaled


@instead_of(
    "samplers.noise:StepNoise.uniform",
    "proposal and acceptance share their noise (vllm#47386, vllm#54282)",
    "generator/test_sampling_runs.py::test_texts_have_the_targets_law",
)
def _(right, self, stream):
    from specdec.samplers import Stream

    return right(self, Stream.ACCEPT if stream == Stream.PROPOSE else stream)


@instead_of(
    "samplers.noise:Noise.at",
    "noise is used again in the next step (vllm#54282)",
    "test_noise.py::test_no_uniform_of_many_rows_and_steps_repeats",
)
def _(right, self, start, width):
    return right(self, 0 * start, width)


@instead_of(
    "samplers.races:draw_by_race",
    "the drafter races one position behind (ml-explore/mlx-swift-lm#459)",
    "test_coupling.py",
)
def _(right, logits, logits_filter, noise, index, **options):
    return right(logits, logits_filter, noise, index + 1, **options)


@instead_of(
    "samplers.noise:Noise.__init__",
    "every row draws with the first row's seed (vllm#6034)",
    "generator/test_row_independence.py",
)
def _(right, self, seeds, **options):
    return right(self, [seeds[0]] * len(seeds), **options)


@instead_of(
    "samplers.noise:Noise.at",
    "a row's noise depends on the padding of its batch (vllm#17498)",
    _LAWS("a_row_is_the_same_alone_and_in_any_batch_order_padding_and_chunking"),
)
def _(right, self, start, width):
    return right(self, start - start.amax() + 40, width)


@instead_of(
    "graphs.rows:keep_rows",
    "a row that moves takes the noise of another (vllm#14645)",
    "loop/test_dropped_rows.py",
)
def _(right, tree, rows):
    kept = right(tree, rows)
    if getattr(kept, "noise", None) is not None:
        kept.noise._key = kept.noise._key.roll(1, dims=0)
    return kept


@instead_of(
    "request.call:_random_seeds",
    "unseeded rows all draw with one seed (TensorRT-LLM#17599)",
    "generator/test_row_independence.py",
)
def _(right, target, rows):
    return [0] * rows


@instead_of(
    "kernels.philox.reference:to_uniforms", "a uniform may be 1 (sglang#35771)", "test_noise.py"
)
def _(right, *words):
    return right(*words) + 2.0**-52


@instead_of(
    "samplers.logits_filter:LogitsFilter.draw",
    "probabilities told are those of the raw logits (transformers#47932)",
    "drafters/test_proposals.py",
)
def _(right, self, logits, uniforms, out=None):
    tokens, probs = right(self, logits, uniforms, out)
    return tokens, probs.copy_(logits.softmax(dim=-1))


@instead_of(
    "samplers.noise:draw_by_inversion",
    "the most likely token beside a soft distribution (transformers#32867)",
    _LAWS("tokens_drawn_many_times_match_the_probabilities_that_come_with_them"),
)
def _(right, logits, *rest, **options):
    return logits.argmax(dim=-1), right(logits, *rest, **options)[1]


@instead_of(
    "drafters.proposal:Proposal.logits_filter",
    "a draft temperature reaches the token, not its probabilities (transformers#47932)",
    _LAWS("a_proposal_is_drawn_at_its_own_temperature_or_is_the_most_likely_token"),
)
def _(right, self, of_target):
    return of_target


# What is read, kept and committed.


@instead_of(
    "loop.state:StepState.context",
    "features are those of the position before (mlc-llm#2664)",
    _RIGHT,
)
def _(right, self):
    found = right(self)
    if found.features is None:
        return found
    return replace(found, features=found.features.roll(1, dims=1))


@instead_of(
    "drafters.head.window:ContextRows.last",
    "the token before the bonus token is drafted after (vllm#4212, vllm#5765)",
    _RIGHT,
)
def _(right, self, out):
    return right(replace(self, counts=self.counts - 1), out)


@instead_of(
    "drafters.eagle:EagleHead.feedback",
    "the normalised state is fed to the next pass (ROCm/ATOM#882)",
    "drafters/test_parity.py",
)
def _(right, self, out):
    return self.norm(out) if self.config.output_norm else out


@instead_of(
    "graphs.tree:fill",
    "a cache that is used again keeps its old entries (vllm#41841)",
    _CACHE,
)
def _(right, tree, value):
    return None


@instead_of(
    "graphs.rows:keep_rows",
    "rows that are kept get the values of other rows (vllm#14645)",
    _CACHE,
)
def _(right, tree, rows):
    return right(tree, sorted(rows, reverse=True))


@instead_of(
    "graphs.rows:keep_rows",
    "a row that is dropped leaves the wrong row behind (vllm#14645, sglang#8726)",
    "loop/test_generation_machine.py",
)
def _(right, tree, rows):
    return right(tree, list(range(len(rows))))


# Graphs, models, checkpoints.


@instead_of(
    "graphs.capture:_check_alike",
    "a captured function takes inputs of another shape (xLLM-AI/xllm#1939)",
    "graphs/test_capture.py",
)
def _(right, *args):
    return None


@instead_of(
    "loop.state:TokenBuffer.note_longest",
    "every step waits for the device (xLLM-AI/xllm#1939)",
    "loop/test_no_host_sync.py",
)
def _(right, self, longest):
    return right(self, int(self.root_position.max()) + 1)


@instead_of(
    "loop.step:numbers_to_check",
    "NaN logits are emitted (sglang#27883)",
    "targets/test_bad_models.py",
)
def _(right, draft, logits):
    return right(draft, logits).nan_to_num(posinf=0.0, neginf=0.0)


@instead_of(
    "targets.view:private_view",
    "a model itself is switched to specdec's attention (hooks that stay)",
    "targets/test_views.py",
)
def _(right, model):
    return model


@instead_of(
    "drafters.mtp.head:MTPHead.feedback",
    "the raw state is passed on where a normalised one was trained (vllm#47448)",
    "drafters/test_mtp_hf.py",
)
def _(right, self, depth, out):
    return out


@instead_of(
    "checkpoints.hf_layers:has_centred_norms",
    "norms of modules multiply by 1 + weight, whatever the target's do (jundot/omlx#1507)",
    "drafters/test_mtp_hf.py",
)
def _(right, model):
    return True


@instead_of(
    "checkpoints.hf_layers:has_centred_norms",
    "norms of modules multiply by the weight where it is stored without the 1 (jundot/omlx#3750)",
    "drafters/test_mtp_qwen.py",
)
def _(right, model):
    return False


@instead_of(
    "drafters.mask_token.head:MaskTokenConfig.rows",
    "DFlash's rows predict the next token (deepseek-ai/DeepSpec)",
    "drafters/test_mask_token_foreign.py",
)
def _(right, self):
    rows = right(self)
    is_same = self.alignment == "same-position"
    return rows._replace(first_row=rows.first_row - 1) if is_same else rows


# Trees.


@instead_of(
    "drafters.tree:TreePlan._grow_drawn",
    "nodes that were drawn are ranked by their own probabilities (arXiv:2406.16858)",
    _LAWS("texts_have_the_targets_distribution"),
)
def _(right, self, *args):
    draft = right(self, *args)
    own = draft.probs.gather(2, draft.tokens[..., None])[..., 0].log()
    scores = own[:, None].where(draft.ancestors[:, 1:, 1:], own.new_zeros(())).sum(dim=2)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    parents, rank = draft.parents.gather(1, order), order.argsort(dim=1)
    return replace(
        draft,
        tokens=draft.tokens.gather(1, order),
        probs=draft.probs.gather(1, order[..., None].expand_as(draft.probs)),
        parents=rank.gather(1, parents.clamp(min=0)).masked_fill(parents < 0, -1),
        runs=None,
    )


@instead_of(
    "samplers.base:Sampler.accept_greedily",
    "greedy accepts any plausible branch (SafeAILab/EAGLE#301)",
    f"drafters/test_trees.py::test_{_TREE}",
)
def _(right, self, draft, target_logits):
    """Nodes among the three likeliest after their parent."""
    from specdec.kernels.verify.tree import path_of, verdict_of

    if draft.is_chain:
        return right(self, draft, target_logits)
    likely = target_logits.topk(3, dim=-1).indices  # [B, N, 3]
    index = draft.window_parents[..., None].expand(-1, -1, 3)
    path = path_of(draft, (likely.gather(1, index) == draft.tokens[..., None]).any(dim=2))
    extra = likely[..., 0].gather(1, path.end)[:, 0]
    return verdict_of(draft, path, extra)
