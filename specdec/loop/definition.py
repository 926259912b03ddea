"""The loop for one row over Hugging Face's own forward and cache: the definition of `loop.step`."""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specdec.drafters.base import Drafter
from specdec.drafters.verified import Verified
from specdec.hf.forward import cache_argument
from specdec.row_step import RowStep
from specdec.samplers import LogitsFilter, Sampler
from specdec.types import Context, TargetOutput


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    drafter: Drafter,
    sampler: Sampler,
    ids: Tensor,
    logits_filter: LogitsFilter,
    max_new_tokens: int,
    seed: int = 0,
) -> tuple[Tensor, list[RowStep]]:
    """Returns a prompt `[1, T]` with its new tokens, and what each step did: each one drafts,
    verifies in one forward, accepts, and crops the cache.

    Args:
        model: whose `generation_config` names the ids that end a text.
        drafter: of chains, that does not read the target's slots.
        sampler, ids, logits_filter: of one row.
        max_new_tokens, seed: as of `SpeculativeGenerator.generate`.

    Raises:
        ValueError: another drafter.

    Example:
        >>> from specdec import RejectionSampler, zoo
        >>> target, ids = zoo.load_target(), torch.tensor([[5, 6, 7]])
        >>> parts = target, zoo.load_drafter("eagle3", target), RejectionSampler()
        >>> text, steps = generate(*parts, ids, LogitsFilter(1, temperature=0), max_new_tokens=16)
        >>> text.equal(target.generate(ids, max_new_tokens=16, do_sample=False)), len(steps) < 16
        (True, True)
    """
    num_layers, layers = model.config.get_text_config().num_hidden_layers, drafter.feature_layers
    if drafter.reads_target or drafter.tree_depth or not {*layers} <= {*range(num_layers), "final"}:
        raise ValueError(
            f"expected a drafter of chains that reads tokens, hidden states below {num_layers} or "
            f"'final', got {type(drafter).__name__}; pass it to SpeculativeGenerator"
        )
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    cache, noise = DynamicCache(config=model.config), sampler.noise_type([seed], device=ids.device)
    cache.activate_past_recording()  # of sliding windows, which a crop moves back

    def number(value: int) -> Tensor:
        return torch.tensor([value], device=ids.device)

    def forward(tokens: Tensor) -> TargetOutput:
        options = {cache_argument(model): cache, "output_hidden_states": bool(layers)}
        out = model(tokens, use_cache=True, **options)
        features = [out.hidden_states[-1 if layer == "final" else layer] for layer in layers]
        return TargetOutput(out.logits, torch.cat(features, dim=-1) if layers else None)

    def context(tokens: Tensor, start: int, num_new: int, features: Tensor | None) -> Context:
        features = features if features is None else features[:, : tokens.shape[1] - 1]
        return Context(tokens, features, number(start), number(num_new))

    output, k, size = forward(ids), drafter.num_draft_tokens, ids.shape[1] + max_new_tokens
    cache.crop(-1)  # the last token is read with the draft
    state = drafter.init_state(1, size + k, vocab_size=output.logits.shape[2], device=ids.device)
    if ids.shape[1] > 1:
        drafter.prefill(context(ids, 0, ids.shape[1] - 2, output.features), state)
    root, steps = max(ids.shape[1] - 2, 0), []
    features = output.features if output.features is None else output.features[:, root:]
    tokens = torch.cat([ids[:, root:], ids[:, -1:]], dim=1)  # what follows the new ones is ignored
    known = context(tokens, root, ids.shape[1] - 1 - root, features)
    while ids.shape[1] < size and not (steps and steps[-1].new_tokens[-1] in ends):
        root = ids.shape[1] - 1
        numbers = noise.at(number(root), width=k + 1)
        draft = drafter.propose(known, state, sampler.drawing(k, logits_filter, numbers))
        output = forward(torch.cat([ids[:, -1:], draft.tokens.clamp(min=0)], dim=1))
        verdict = sampler(draft, output.logits, logits_filter, numbers)
        count = int(verdict.num_accepted) + 1  # and one more token
        if count < k + 1:
            cache.crop(count - k - 1)  # what was rejected
        emitted = verdict.tokens[:, :count]
        known = context(torch.cat([ids[:, -1:], emitted], dim=1), root, count, output.features)
        new = emitted[0, : size - ids.shape[1]].tolist()
        new = new[: next((i + 1 for i, token in enumerate(new) if token in ends), None)]
        if drafter.reads_outcome:
            drafter.learn(Verified(draft, output, verdict, number(len(new)), ids[:, -1]), state)
        steps.append(RowStep(draft.tokens[draft.is_valid].tolist(), count - 1, new))
        ids = torch.cat([ids, emitted[:, : len(new)]], dim=1)
    return ids, steps
