"""Trees: the rules, how a tree is drawn, and what target, cache and processors see of one."""

from dataclasses import replace

import torch
from mutation import Edit, Fault, Swap

_TREE = "kernels.verify.tree:{}".format
_LAW = "test_tree_laws.py::test_every_tree_leaves_the_targets_law"
_DRAWN = "drafters/test_laws.py::test_texts_have_the_targets_distribution"
_WHOLE = (
    "drafters/test_trees.py::"
    "test_greedy_text_is_that_of_hf_and_a_target_that_drafts_for_itself_is_never_rejected"
)


def _reranked(right):
    """The nodes of a drawn tree in the order of the probabilities of their paths."""

    def grow(self, *args):
        draft = right(self, *args)
        own = draft.probs.gather(2, draft.tokens[..., None])[..., 0].log()
        scores = own[:, None].where(draft.ancestors[:, 1:, 1:], torch.zeros(())).sum(dim=2)
        order = scores.sort(dim=1, descending=True, stable=True).indices
        parents, rank = draft.parents.gather(1, order), order.argsort(dim=1)
        return replace(
            draft,
            tokens=draft.tokens.gather(1, order),
            probs=draft.probs.gather(1, order[..., None].expand_as(draft.probs)),
            parents=torch.where(parents < 0, -1, rank.gather(1, parents.clamp(min=0))),
            runs=None,
        )

    return grow


def _takes_what_is_plausible(right):
    """Accepts nodes among the three likeliest after their parent."""

    def accept_greedily(self, draft, target_logits):
        from specdec.kernels.verify.tree import path_of, verdict_of

        if draft.parents is None:
            return right(self, draft, target_logits)
        likely = target_logits.topk(3, dim=-1).indices  # [B, N, 3]
        index = draft.window_parents[..., None].expand(-1, -1, 3)
        path = path_of(draft, (likely.gather(1, index) == draft.tokens[..., None]).any(dim=2))
        extra = likely[..., 0].gather(1, path.end)[:, 0]
        return verdict_of(draft, path, extra, target_logits.amax(dim=-1))

    return accept_greedily


TREES = [
    Fault(
        "children that were chosen are judged by the ratio",
        "a trial of trees",
        _DRAWN,
        Edit(
            *(
                "drafters.tree:TreePlan._grow_drawn",
                "tokens = drafting.draw(own.contiguous(), depth=depth)",
            ),
            "drafting.draw(own.contiguous(), depth=depth); "
            "tokens = drafting.tokens[-1] = own.argmax(dim=-1)",
        ),
    ),
    Fault(
        "nodes that were drawn are ranked by their own probabilities",
        "arXiv:2406.16858",
        _DRAWN,
        Swap("drafters.tree:TreePlan._grow_drawn", _reranked),
    ),
    Fault(
        "a rejected child leaves the target as it was",
        "arXiv:2305.09781",
        _LAW,
        Edit(_TREE("recursive_rejection"), "run.leave(run.target - run.draft)", "pass"),
    ),
    Fault(
        "a path is judged as if its elder siblings had not been rejected",
        "arXiv:2505.12398",
        _LAW,
        Edit(_TREE("traversal"), "carried.scatter_(1, run.parents, left)", "pass"),
    ),
    Fault(
        "the residual of point masses forgets all but the first child",
        "a trial of trees",
        _LAW,
        Edit(
            _TREE("_points"),
            "is_child = (draft.window_parents == end)",
            "is_child = ~draft.elders.any(dim=2) & (draft.window_parents == end)",
        ),
    ),
    Fault(
        "a point mass has the share of all, not of what its siblings left",
        "a trial of trees",
        _LAW,
        Edit(_TREE("_points"), "accept * left.clamp(min=0)", "accept * left.clamp(min=1)"),
    ),
    Fault(
        "a node is judged by the logits of the node before it",
        "TensorRT-LLM#15098",
        _LAW,
        Edit(
            _TREE("_runs"),
            "draft.window_parents[:, nodes]",
            "torch.arange(nodes.start, nodes.stop).expand(len(draft.tokens), -1)",
        ),
    ),
    Fault(
        "the extra token of a tree is that of the last row of its window",
        "TensorRT-LLM#15098",
        _WHOLE,
        Edit(
            _TREE("verify_tree_points"),
            "target_tokens.gather(1, path.end)[:, 0]",
            "target_tokens[:, -1]",
        ),
    ),
    Fault(
        "greedy accepts any plausible branch",
        "SafeAILab/EAGLE#301",
        _WHOLE,
        Swap("samplers.base:Sampler.accept_greedily", _takes_what_is_plausible),
    ),
    Fault(
        "siblings race with the noise of their indices",
        "a trial of trees",
        "test_tree_laws.py::test_coupling_takes_the_nodes_that_the_target_would_draw",
        Edit(
            "samplers.coupling:CouplingSampler.accept",
            "noise.at_depths(draft.depths)",
            "noise",
        ),
    ),
    Fault(
        "the cache keeps the first rows of a window, not the accepted path",
        "a trial of trees",
        _WHOLE,
        Edit(
            "target.cache:SlotCache.follow",
            "start[:, None] + path[:, 1:]",
            "start[:, None] + torch.arange(1, path.shape[1], device=path.device)",
        ),
    ),
    Fault(
        "features are those of the first rows, not of the accepted path",
        "a trial of trees",
        "drafters/test_trees.py",
        Edit(
            "loop.step:commit",
            "features.gather(1, rows[..., None].expand(-1, -1, features.shape[2]))",
            "features[:, : depth + 1]",
        ),
    ),
    Fault(
        "nodes stand at their index in the window, not at their depth",
        "a trial of trees",
        _WHOLE,
        Edit("target.hf_model:Target.verify", "start[:, None] + draft.depths", "slots"),
    ),
    Fault(
        "nodes see all nodes before them, not their ancestors",
        "a trial of trees",
        _WHOLE,
        Edit(
            "target.hf_model:Target.verify",
            "draft.ancestors",
            "torch.ones_like(draft.ancestors).tril()",
        ),
    ),
    Fault(
        "processors see the nodes of a tree as a chain",
        "a trial of trees",
        "request/test_hf_habits.py::"
        "test_every_node_of_a_tree_is_processed_as_the_end_of_its_own_path",
        Edit(
            "loop.processors:process_step",
            "None if draft.parents is None else draft.parents[rows]",
            "None",
        ),
    ),
]
