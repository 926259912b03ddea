"""`GBVSampler` and `SpecTrSampler`: speculative sampling over paths drawn independently of each
other (`drafters.Paths`).
"""

from typing import Any

from torch import Tensor

from specdec.kernels import filtered_probs
from specdec.kernels.verify.paths import (
    PathDraft,
    verify_greedy_path,
    verify_sequential_paths,
)
from specdec.samplers.base import Sampler, judge, rule_uniforms
from specdec.samplers.logits_filter import LogitsFilter
from specdec.samplers.noise import StepNoise
from specdec.types import Draft, Verdict


class PathSampler(Sampler):
    """A rule for independent paths.

    Of one path, a chain, it is `BlockSampler`; where tokens are point masses, so that independent
    paths would agree, it accepts the target's own token on any tree, more than which no lossless
    rule can.
    """

    lossless = True
    takes_trees = True

    def check_drafter(self, drafter: Any) -> None:
        """Raises ValueError for a tree of another shape as well: its tokens could be verified in
        greedy calls only, where they are point masses.
        """
        tree, proposal = getattr(drafter, "tree", None), getattr(drafter, "proposal", None)
        samples = getattr(proposal, "kind", None) == "sample"
        if samples and tree is not None and not hasattr(tree, "num_paths"):
            raise ValueError(
                f"{type(self).__name__} verifies paths that were drawn independently of each "
                f"other, and {type(drafter).__name__} samples a tree of {tree.nodes}x{tree.depth}; "
                "draft with tree=\"4x5 paths\", for instance, or proposal='argmax', or verify the "
                "tree by BlockSampler"
            )

    def accept(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: StepNoise
    ) -> Verdict:
        """Several paths.

        Raises:
            ValueError: of another tree whose tokens were sampled.
        """
        if draft.is_chain or draft.probs is None:
            return judge(draft, target_logits, logits_filter, noise, by_block=True)
        if not isinstance(draft, PathDraft):
            raise ValueError(
                f"{type(self).__name__} verifies paths that were drawn independently of each "
                'other; draft with tree="4x5 paths", or verify other trees by BlockSampler'
            )
        probs = filtered_probs(target_logits, logits_filter.params(target_logits))
        return self.verify_paths(draft, probs, rule_uniforms(draft, noise))


class GBVSampler(PathSampler):
    """Greedy multi-path block verification: of several independent paths the block rule for the
    best one, that whose tokens have the largest target / draft, the first token first.

    What the best path is drawn from has a closed form. Where the target is far from the draft the
    best of several is a better draft; where they are close it is a worse one than any of them: of
    equal distributions the block rule accepts everything, and this rule does not.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> from specdec.samplers import GBVSampler
        >>> target = zoo.load_target()
        >>> drafter = zoo.load_drafter("model", target, tree="2x3 paths")
        >>> SpeculativeGenerator(target, drafter, GBVSampler()).drafter.num_draft_tokens
        6

    Reference: Thomas, Pal, arXiv:2602.16961.
    """

    verify_paths = staticmethod(verify_greedy_path)


class SpecTrSampler(PathSampler):
    """One independent path after the other is tried, until one is accepted in part: whether by
    SpecTr's k-sequential selection of the first token, and how much of it by the block rule.

    Example:
        >>> from specdec.samplers import SpecTrSampler
        >>> SpecTrSampler().lossless
        True

    Reference: Sun et al., arXiv:2310.15141, for one token. The union with block verification is
    derived in `kernels/verify/README.md`. It is not SpecTr-GBV (arXiv:2604.25925).
    """

    verify_paths = staticmethod(verify_sequential_paths)
