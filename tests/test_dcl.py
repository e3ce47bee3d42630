"""DCL and DCLW on one process; see also workers/test_objectives.py and test_plain_steps.py."""

import pytest
import torch
import torch.nn.functional as F

from raycl.loss_specs import LOSSES
from raycl.losses import dcl
from raycl.losses.dcl import Dcl
from tests.embeddings import make_views
from tests.gradients import assert_close, leaves, value_and_gradients
from tests.plain_losses import plain_dcl

pytestmark = pytest.mark.usefixtures("one_thread")
SIGMAS = (None, 0.5)


@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
@pytest.mark.parametrize("sigma", SIGMAS)
def test_value_and_gradient_equal_those_of_lightly(sigma: float | None) -> None:
    peers = pytest.importorskip("lightly.loss.dcl_loss")
    views = leaves(*make_views(40, 8, noise=1.0), dtype=torch.float64)
    units = [F.normalize(view, dim=1) for view in views]
    peer = peers.DCLLoss(0.1) if sigma is None else peers.DCLWLoss(0.1, sigma)
    expected = value_and_gradients(peer(*views), views)
    assert_close(value_and_gradients(dcl(*units, temperature=0.1, sigma=sigma), views), expected, 1e-9)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("temperature", (0.5, 0.07, 0.01))
def test_value_and_gradient_equal_the_plain_formula(temperature: float, sigma: float | None) -> None:
    inputs = *make_views(300, 8, noise=1.0), torch.tensor(temperature)
    exact, single = leaves(*inputs, dtype=torch.float64), leaves(*inputs)
    expected = value_and_gradients(plain_dcl(*exact, sigma=sigma), exact)
    found = dcl(*single[:2], temperature=single[2], sigma=sigma)
    assert_close(value_and_gradients(found, single), expected, 1e-5)


def test_a_batch_of_one_sample_has_no_negatives_and_a_finite_gradient() -> None:
    views = leaves(*make_views(4, 3), dtype=torch.float64)
    value = dcl(*views, temperature=0.1, sample_id=torch.zeros(4, dtype=torch.int64))
    positives = -(views[0] * views[1]).sum(1).mean() / 0.1
    assert_close(value_and_gradients(value, views), value_and_gradients(positives, views), 1e-12)


def test_dclw_is_dcl_with_the_sigma_of_the_paper() -> None:
    assert LOSSES["dcl"].build(temperature=0.1) == Dcl(temperature=0.1)
    assert LOSSES["dclw"].build(temperature=0.1) == Dcl(temperature=0.1, sigma=0.5)


def test_a_setting_that_no_loss_has_is_refused() -> None:
    with pytest.raises(AssertionError, match="no loss has the settings {'sigmas'}"):
        LOSSES["dclw"].build(temperature=0.1, sigmas=0.5)
