"""From a draft to a verdict: here the rule for its shape is chosen, and the device.

A chain is a tree, and the rules of `tree` are those of `reference` there. Those of `reference`
accept a prefix with a few operations over `[B, K]`, where trees need tables `[B, K, K]` and one
pass after another.

Legend: B rows, K draft tokens (nodes of a tree), N = K + 1 rows of the window, V vocabulary.
"""

from torch import Tensor

from specdec.kernels.truncate.reference import filtered_probs
from specdec.kernels.types import FilterParams, VerifyUniforms, suits_kernels
from specdec.kernels.verify import reference as chain
from specdec.types import Draft, Verdict


def verify(
    draft: Draft, logits: Tensor, params: FilterParams, uniforms: VerifyUniforms, *, by_block: bool
) -> Verdict:
    """As `verify_probs`, from logits.

    Args:
        draft: K tokens per row.
        logits: `[B, N, V]` of the target.
        params: how they become probabilities.
        uniforms, by_block: see `verify_probs`.

    Example:
        >>> import torch
        >>> draft, logits = Draft(torch.tensor([[1]])), torch.tensor([[[0.0, 0.0], [0.0, 9.0]]])
        >>> accept, resample = torch.tensor([[0.4]]).double(), torch.tensor([0.5]).double()
        >>> uniforms = VerifyUniforms(accept, resample)
        >>> verify(draft, logits, FilterParams(), uniforms, by_block=False).tokens
        tensor([[1, 1]])
    """
    if draft.is_chain and logits.is_cuda and suits_kernels(logits):
        from specdec.kernels.verify import triton

        return triton.verify(draft, logits, params, uniforms, by_block=by_block)
    return verify_probs(draft, filtered_probs(logits, params), uniforms, by_block=by_block)


def verify_probs(
    draft: Draft, target_probs: Tensor, uniforms: VerifyUniforms, *, by_block: bool
) -> Verdict:
    """Accepts a path of a draft, a chain's is a prefix, and draws one more token: by `block_rule`,
    of a tree `traversal`, or else by `token_rule`, of a tree `recursive_rejection`.

    Args:
        draft: K tokens per row.
        target_probs: `[B, N, V]`, overwritten.
        uniforms: to accept and to resample.
        by_block: which rule. For drafts without probabilities or tokens both are the same.
    """
    if not draft.is_chain:
        from specdec.kernels.verify import tree

        return tree.verify_tree(draft, target_probs, uniforms, by_block=by_block)
    if not draft.tokens.shape[1]:
        return Verdict(*chain.undrafted_rule(target_probs, uniforms.resample), draft.num_valid)
    rule = chain.block_rule if by_block and draft.probs is not None else chain.token_rule
    return Verdict(*rule(draft, target_probs, uniforms), draft.num_valid)


def verify_points(draft: Draft, target_tokens: Tensor) -> Verdict:
    """Accepts what equals the target's own tokens.

    Args:
        draft: K tokens per row; probabilities are not used.
        target_tokens: `[B, N]`, after each row of the window.
    """
    if not draft.is_chain:
        from specdec.kernels.verify import tree

        return tree.verify_tree_points(draft, target_tokens)
    return Verdict(*chain.point_rule(draft, target_tokens), draft.num_valid)
