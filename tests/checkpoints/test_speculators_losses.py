"""Losses by the names of vLLM's speculators have its values and gradients, as the package itself
computes them. It is not among the package's dependencies (CONTRIBUTING, "Set up").
"""

import pytest
import torch

from specdec.lab.training import divergences
from specdec.lab.training.step_weights import Decay, DPace

pytestmark = pytest.mark.slow
THEIRS = {"kl": "kl_div", "reverse_kl": "rkl", "js": "jsd"}
"""Names that differ."""


@pytest.fixture(scope="module")
def losses():
    pytest.importorskip("speculators")
    from speculators.losses import utils

    return utils


def logits_of(seed, vocab, scale):
    generator = torch.Generator().manual_seed(seed)
    draft, target = scale * torch.randn(2, 1, 24, vocab, generator=generator)
    return draft.requires_grad_(), target


@pytest.mark.parametrize("vocab", [2, 5, 1000])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("name", [n for n in divergences.LOSSES if n != "soft_ce"])
def test_values_and_gradients_are_those_of_speculators(losses, name, scale, vocab):
    (theirs, _) = losses.resolve_loss_config(THEIRS.get(name, name), "eager").popitem()[1]
    draft, target = logits_of(vocab, vocab, scale)
    ours = divergences.LOSSES[name](draft.log_softmax(-1), target.log_softmax(-1))
    wanted = theirs(draft, target)
    assert (wanted < 11).all() or name != "nla"  # there they cut off at an acceptance of 1e-5
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(each.sum(), draft)[0] for each in (ours, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_a_sum_of_losses_is_theirs(losses):
    draft, target = logits_of(1, 50, 1.0)
    ones = torch.ones(1, 24)
    terms = losses.resolve_loss_config('{"ce": 0.7, "tv": 0.3}', "eager")
    wanted, _ = losses.compound_loss(draft, target, ones, 0 * ones, terms)
    ours = divergences.find_loss("ce:0.7,tv:0.3")(draft.log_softmax(-1), target.log_softmax(-1))
    torch.testing.assert_close(ours.mean(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.2, 0.5, 1.0])
def test_weights_of_dpace_are_theirs(losses, smoothing):
    """Blocks of six steps, four of them, without an anchor's own position."""
    draft, target = logits_of(2, 50, 1.0)
    nats = divergences.ce(draft.log_softmax(-1), target.log_softmax(-1)).detach()
    theirs = losses.dpace_loss_decay(
        pos_idx=None,
        loss_mask=torch.ones(1, 24),
        block_size=6,
        dpace_alpha=smoothing,
        elementwise_loss=nats,
    )
    ours = 6 * DPace(smoothing)(nats.view(4, 6).T)
    torch.testing.assert_close(ours.T.flatten(), theirs[0])


def test_weights_that_decay_are_theirs_up_to_their_sum(losses):
    theirs = losses.exp_loss_decay(torch.arange(5), 0.8)
    ours = Decay(0.8)(torch.zeros(5, 1))[:, 0]
    torch.testing.assert_close(ours, theirs / theirs.sum())
