"""Laws 1 to 6 and 8: what is drawn, and with which noise."""

from mutation import Edit, Fault, Swap

_RULE = "kernels.verify.reference:{}".format
_LAW = "test_sampler_laws.py::test_a_round_has_the_law_of_the_target_behind_each_filter"
_TEXTS = "generator/test_sampling_runs.py::test_texts_have_the_targets_law"


def _with_start(change):
    """Noise at another position than that of the step's anchor."""
    return lambda right: lambda self, start, width: right(self, change(start), width)


def _streams_shared(right):
    from specdec.samplers import Stream

    return lambda self, stream: right(self, Stream.ACCEPT if stream == Stream.PROPOSE else stream)


def _laws_without_temperature(right):
    """Tokens as they are drawn, probabilities of the raw logits."""

    def draw(self, logits, uniforms, out=None):
        tokens, probs = right(self, logits, uniforms, out)
        return tokens, probs.copy_(logits.softmax(dim=-1))

    return draw


DRAWING = [
    # Law 1.
    Fault(
        "the recovered token is drawn from the target",
        "transformers#28166",
        _LAW,
        Edit(
            _RULE("_resampled"), "torch.where(is_left[:, None], residual, target_row)", "target_row"
        ),
    ),
    Fault(
        "the extra token is drawn from the row before",
        "TensorRT-LLM#15098",
        _LAW,
        Edit(
            _RULE("_resampled"),
            "take_rows(target_probs, num_accepted[:, None])[:, 0]",
            "take_rows(target_probs, (num_accepted - 1).clamp(min=0)[:, None])[:, 0]",
        ),
    ),
    Fault(
        "a rejected point mass may be drawn again",
        "transformers#32867",
        _LAW,
        Edit(_RULE("_resampled"), "target_row.scatter(-1, rejected, 0.0)", "target_row"),
    ),
    Fault(
        "tokens are accepted behind a rejected one",
        "sglang#35771",
        _LAW,
        Edit(_RULE("token_rule"), "is_accepted.cumprod(dim=-1, dtype=torch.long)", "is_accepted"),
    ),
    Fault(
        "a short row's invalid tokens are accepted",
        "vllm#46899",
        "test_sampler_laws.py::test_a_short_row_is_decided_as_a_draft_of_so_many_tokens",
        Edit("types:Draft.is_valid", "index < limit", "index >= 0"),
    ),
    Fault(
        "a block's residual is the token-wise one",
        "arXiv:2403.10444",
        _LAW,
        Edit(_RULE("block_rule"), "path.gather(1, num_accepted[:, None])", "None"),
    ),
    Fault(
        "truncation reaches the bonus token's row only",
        "vllm#42744",
        _LAW,
        Edit(
            "samplers.base:judge",
            "params, uniforms = warp.params(target_logits), rule_uniforms(draft, noise)",
            """params, uniforms = warp.params(target_logits), rule_uniforms(draft, noise)
    if params.cutoff is not None:
        params.cutoff.logits[:, :-1] = -float("inf")""",
        ),
    ),
    Fault(
        *(
            "top-p counts the tokens that top-k has removed",
            "sglang test_eagle_sampling_filters.py",
        ),
        "test_warp.py::test_warp_is_the_warpers_of_huggingface_with_one_value_per_row",
        Swap("kernels.truncate.reference:drop_below", lambda right: lambda scaled, cutoff: scaled),
    ),
    # Law 2.
    Fault(
        "proposal and acceptance share their noise",
        "vllm#47386, vllm#54282",
        _TEXTS,
        Swap("samplers.noise:StepNoise.uniform", _streams_shared),
    ),
    Fault(
        "noise is used again in the next step",
        "vllm#54282",
        "test_noise.py::test_no_uniform_of_many_rows_and_steps_repeats",
        Swap("samplers.noise:Noise.at", _with_start(lambda start: 0 * start)),
    ),
    # Law 3.
    Fault(
        "greedy rows take the last of equal logits",
        "tpu-inference#3580",
        "test_warp.py",
        Edit(
            *(
                "kernels.truncate.reference:one_hot_greedy_rows",
                "logits.argmax(dim=-1, keepdim=True)",
            ),
            "logits.shape[-1] - 1 - logits.flip(-1).argmax(dim=-1, keepdim=True)",
        ),
    ),
    Fault(
        "the first draft token is committed unverified",
        "vllm#41841",
        "drafters/test_laws.py::test_greedy_text_is_that_of_hf_in_ragged_batches_and_alone",
        Edit(
            _RULE("point_rule"),
            "is_accepted = draft.tokens == target_tokens[:, :-1]",
            """target_tokens = target_tokens.clone()
    target_tokens[:, : min(1, draft.tokens.shape[1])] = draft.tokens[:, :1]
    is_accepted = draft.tokens == target_tokens[:, :-1]""",
        ),
    ),
    # Law 4.
    Fault(
        *(
            "the drafter races one position behind",
            "ml-explore/mlx-swift-lm#459",
            "test_coupling.py",
        ),
        Swap(
            "samplers.drawing:draw_by_race",
            lambda right: (
                lambda logits, warp, noise, index, **options: right(
                    logits, warp, noise, index + 1, **options
                )
            ),
        ),
    ),
    # Law 5.
    Fault(
        "every row draws with the first row's seed",
        "vllm#6034",
        "generator/test_row_independence.py",
        Swap(
            "samplers.noise:Noise.__init__",
            lambda right: (
                lambda self, seeds, **options: right(self, [seeds[0]] * len(seeds), **options)
            ),
        ),
    ),
    Fault(
        "a row's noise depends on the padding of its batch",
        "vllm#17498",
        "drafters/test_laws.py::test_a_row_is_the_same_alone_and_in_any_batch_order_padding_and_chunking",
        Swap("samplers.noise:Noise.at", _with_start(lambda start: start - start.amax() + 40)),
    ),
    Fault(
        "a row that moves takes the noise of another",
        "vllm#14645",
        "loop/test_dropped_rows.py",
        Swap(
            "samplers.noise:Noise.keep",
            lambda right: lambda self, rows: right(self, list(range(len(rows)))),
        ),
    ),
    Fault(
        "unseeded rows all draw with one seed",
        "TensorRT-LLM#17599",
        "generator/test_row_independence.py",
        Swap("request.call:_random_seeds", lambda right: lambda target, rows: [0] * rows),
    ),
    # Law 6.
    Fault(
        "a token is accepted at exactly its ratio",
        "sglang#35771",
        "test_rejection_zero.py::test_a_token_is_accepted_strictly_below_its_ratio",
        Edit(_RULE("token_rule"), "draft_of_draft < target", "draft_of_draft <= target"),
    ),
    Fault(
        "an id of weight 0 is drawn at a uniform of 0",
        "sglang#35771",
        "kernels/test_kernels_sample.py",
        Edit("kernels.sample.reference:draw", "right=True", "right=False"),
    ),
    Fault(
        "an empty residual is drawn from",
        "jaymody/speculative-sampling#5",
        "test_rejection_zero.py::test_a_rejection_that_leaves_nothing_draws_from_the_target",
        Edit(_RULE("_resampled"), "is_short & (residual.sum(dim=-1) > 0)", "is_short"),
    ),
    Fault(
        "a uniform may be 1",
        "sglang#35771",
        "test_noise.py",
        Swap(
            "kernels.philox.reference:to_uniforms",
            lambda right: lambda *words: right(*words) + 2.0**-52,
        ),
    ),
    # Law 8.
    Fault(
        "probabilities told are those of the raw logits",
        "transformers#47932",
        "drafters/test_proposals.py",
        Swap("samplers.warp:Warp.draw", _laws_without_temperature),
    ),
    Fault(
        "the most likely token beside a soft distribution",
        "transformers#32867",
        "drafters/test_laws.py::test_tokens_drawn_many_times_match_the_probabilities_that_come_with_them",
        Swap(
            "samplers.drawing:draw_by_inversion",
            lambda right: (
                lambda logits, *rest, **options: (
                    logits.argmax(dim=-1),
                    right(logits, *rest, **options)[1],
                )
            ),
        ),
    ),
    Fault(
        "each distribution is written over the one before it",
        "a shared table",
        "drafters/test_proposals.py",
        Edit(
            "drafters.proposal:Drafting._draw",
            "self._probs[:, index : index + count]",
            "self._probs[:, :count]",
        ),
    ),
    Fault(
        "a draft temperature reaches the token, not its probabilities",
        "transformers#47932",
        "drafters/test_laws.py::test_a_proposal_is_drawn_at_its_own_temperature_or_is_the_most_likely_token",
        Swap("drafters.proposal:Proposal.warp", lambda right: lambda self, of_target: of_target),
    ),
]
