"""The loss in chunks is the plain loss, with the same gradients and a fraction of its memory."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures import build
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from training_runs import random_text

from specdec.lab.training import Distillation, NextToken
from specdec.lab.training.divergences import soft_ce, tv
from specdec.lab.training.losses import losses_of
from specdec.lab.training.teacher import SoftLabels

VOCAB, WIDTH = 37, 6


def case(seed, rows, tokens, num_ids):
    """A vocabulary head, its inputs, the target's logits, and the ids that the head has."""
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(WIDTH, num_ids, bias=False)
    head.weight.data.normal_(generator=generator)
    out = torch.randn(rows, tokens, WIDTH, generator=generator, requires_grad=True)
    logits = 5 * torch.randn(rows, tokens, VOCAB, generator=generator)
    ids = torch.randperm(VOCAB, generator=generator)[:num_ids].sort().values
    return head, out, logits, None if num_ids == VOCAB else ids


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([VOCAB, 11, 1]),
    st.integers(1, 400),
)
def test_loss_and_gradients_do_not_depend_on_the_chunks(seed, rows, tokens, num_ids, chunk):
    head, out, logits, ids = case(seed, rows, tokens, num_ids)
    probs = logits.softmax(dim=-1)
    probs = probs if ids is None else probs[..., ids]
    labels = SoftLabels.of(logits, ids)
    torch.testing.assert_close(labels.probs(), probs)
    plain = -(probs * head(out).log_softmax(dim=-1)).sum(dim=-1).mean()
    lean = losses_of(out, head, labels, soft_ce, chunk_elements=chunk)[0].mean()
    torch.testing.assert_close(lean, plain)
    wanted = torch.autograd.grad(plain, (out, head.weight))
    got = torch.autograd.grad(lean, (out, head.weight))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_labels_of_a_range_are_the_range_of_the_labels():
    _, _, logits, ids = case(3, 2, 8, 11)
    labels = SoftLabels.of(logits, ids)
    assert labels.at(2, 5).probs().equal(labels.probs()[:, 2:7])


@pytest.mark.parametrize("chunk_elements", [10**9, 64 * 50])
def test_logits_of_all_positions_are_never_there_at_once(chunk_elements):
    """What the backward pass keeps is counted: without chunks it holds every logit."""
    head, out, logits, _ = case(0, 4, 250, VOCAB)
    labels, kept = SoftLabels.of(logits), []

    def count(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        losses_of(out, head, labels, soft_ce, tv, chunk_elements=chunk_elements)
    holds_all = any(n >= 4 * 250 * VOCAB for n in kept)
    assert holds_all == (chunk_elements == 10**9)


def test_next_token_is_the_loss_of_hf():
    model, ids = build("llama"), torch.from_numpy(np.stack(random_text()))
    expected = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(NextToken(model)(ids), expected)


def test_distillation_is_the_divergence_from_the_target_plus_its_entropy():
    target, draft = build("llama"), build("qwen3", seed=1)
    ids = torch.from_numpy(np.stack(random_text()))
    law = target(input_ids=ids[:, :-1]).logits.softmax(-1)
    entropy = -(law * law.log()).sum(-1).mean()
    student = draft(input_ids=ids[:, :-1]).logits.log_softmax(-1)
    divergence = F.kl_div(student, law, reduction="none").sum(-1).mean()
    objective = Distillation(draft, target)
    torch.testing.assert_close(objective(ids), divergence + entropy)
    assert {key for key, _ in objective.named_parameters()} == {
        f"model.{key}" for key, _ in draft.named_parameters()
    }
    own = Distillation(copy.deepcopy(target).requires_grad_(True), target)
    loss = own(ids)
    torch.testing.assert_close(loss, entropy)
    loss.backward()
    assert max(p.grad.abs().max() for p in own.parameters()) < 1e-6
