"""What a sample of n scores in D dimensions shows of a Fisher matrix with a few large eigenvalues."""

import pytest
import torch
from torch import Tensor

from pyro_ngvi.fisher.low_rank import _debias


def shown(spikes: Tensor, level: Tensor, D: float, n: float) -> Tensor:
    """Sample eigenvalues of spikes l over a level r: l (1 + (D/n) / (l/r - 1)) (Baik & Silverstein)."""
    return spikes * (1.0 + (D / n) / (spikes / level - 1.0))


@pytest.mark.parametrize("D, n", [(40.0, 160.0), (40.0, 4000.0), (500.0, 200.0), (100.0, 100.0)])
def test_the_bias_of_sample_eigenvalues_is_inverted(D: float, n: float) -> None:
    edge = 1.0 + (D / n) ** 0.5
    spikes = torch.tensor([8.0, 5.0, 3.0]) * edge
    # the trace is D: three spikes, and a level for the rest
    level = (D - spikes.sum()) / (D - 3.0)
    assert bool((spikes / level > edge).all())
    noise = level * torch.tensor([0.9, 0.5])  # two eigenvalues from the bulk
    found, rest = _debias(
        torch.cat([shown(spikes, level, D, n), noise]), torch.tensor(D), torch.tensor(n)
    )
    torch.testing.assert_close(found, torch.cat([spikes, level.expand(2)]), rtol=1e-6, atol=0)
    torch.testing.assert_close(rest, level, rtol=1e-6, atol=0)


@pytest.mark.parametrize("D, n", [(40.0, 160.0), (500.0, 200.0), (10.0, 1000.0)])
def test_eigenvalues_within_the_edge_of_the_noise_are_noise(D: float, n: float) -> None:
    """Of F = I the sample shows eigenvalues up to (1 + sqrt(D/n))^2, and nothing is made of them."""
    edge = (1.0 + (D / n) ** 0.5) ** 2
    spikes, level = _debias(
        edge * torch.tensor([0.999, 0.9, 0.5]), torch.tensor(D), torch.tensor(n)
    )
    torch.testing.assert_close(spikes, torch.ones(3))
    torch.testing.assert_close(level, torch.ones(()))
    spikes, level = _debias(edge * torch.tensor([1.01, 0.9]), torch.tensor(D), torch.tensor(n))
    assert spikes[0] > 1.0 + 0.9 * (D / n) ** 0.5  # where the phase transition has them
    assert spikes[1] == level < 1.0
    torch.testing.assert_close(spikes[0] + (D - 1.0) * level, torch.tensor(D))
