"""check_vectorized finds models that are wrong with Pyro's own vectorised particles."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from pyro_ngvi.diagnostics import check_vectorized
from tests.contract.same_noise import GUIDES, D, N, data, nested_plates


def test_vectorized_check_accepts_models_written_for_it() -> None:
    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(X.new_zeros(D), 1.0).to_event(1))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal((X * w).sum(-1), scale), obs=y)

    for guide in GUIDES.values():
        pyro.clear_param_store()
        check_vectorized(model, guide(model), *data(torch.float64), num_particles=4)
    check_vectorized(nested_plates, AutoNormal(nested_plates), *data(torch.float64))


def test_vectorized_check_with_a_minibatch() -> None:
    def model(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", N, subsample_size=3) as index:
            z = pyro.sample("z", dist.Normal(w, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y[index])

    check_vectorized(model, AutoNormal(model), data(torch.float64)[1])


def wrong_matmul(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def silent_broadcast(X: Tensor, y: Tensor) -> None:
    """w[0] is the first particle, not the first element, once the particles are vectorised."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(w[0].sum() * y, 1.0), obs=y)


def test_vectorized_check_names_a_model_that_fails() -> None:
    with pytest.raises(ValueError, match=r"fails after the site 'data': .*\(X \* w\).sum\(-1\)"):
        check_vectorized(wrong_matmul, AutoNormal(wrong_matmul), torch.ones(4, 3), torch.ones(4))


def test_vectorized_check_names_a_silently_wrong_site() -> None:
    guide = AutoNormal(silent_broadcast)
    with pytest.raises(ValueError, match=r"the site 'y' has shape \(2, 4\) and differs"):
        check_vectorized(silent_broadcast, guide, torch.ones(4, 2), torch.ones(4))


def test_vectorized_check_names_a_guide_that_broadcasts() -> None:
    def model() -> None:
        pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    def guide() -> None:
        v = pyro.sample("v", dist.Normal(0.0, 1.0), infer={"is_auxiliary": True})
        pyro.sample("w", dist.Normal(v[..., None, None].expand(*v.shape, 3, 3), 1.0).to_event(1))

    with pytest.raises(ValueError, match="program fails after the site 'v': Shape mismatch"):
        check_vectorized(model, guide)


def test_vectorized_check_names_a_latent_site_of_other_shape() -> None:
    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("v", dist.Normal(w.flatten()[:1].exp(), 1.0).to_event(1))

    def guide() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        loc = w.flatten().repeat(w.numel())
        pyro.sample("v", dist.Normal(loc, 1.0).to_event(1))

    with pytest.raises(ValueError, match=r"latent site 'v' has shape \(2, 4\), but one draw has"):
        check_vectorized(model, guide)


def ordered(X: Tensor, y: Tensor) -> None:
    """OrderedLogistic fills a tensor of its own, which vmap cannot run."""
    w = pyro.sample("w", dist.Normal(X.new_zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        cutpoints = X.new_tensor([-1.0, 0.5])
        pyro.sample("y", dist.OrderedLogistic((X * w).sum(-1), cutpoints), obs=y)


def ordered_broadcast(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        cutpoints = X.new_tensor([-1.0, 0.5])
        pyro.sample("y", dist.OrderedLogistic(w[0].sum() * X[:, 0], cutpoints), obs=y)


def branching(X: Tensor, y: Tensor) -> None:
    """One branch for all particles."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(w, 1.0 if bool((w > 0).all()) else 2.0), obs=y)


def test_vectorized_check_compares_one_by_one_what_vmap_can_not_run() -> None:
    args = torch.randn(4, 2), torch.tensor([0.0, 1.0, 2.0, 1.0])
    check_vectorized(ordered, AutoNormal(ordered), *args, num_particles=4)
    for wrong, shape in ((ordered_broadcast, r"\(4, 4\)"), (branching, r"\(4, 4\)")):
        pyro.clear_param_store()
        guide = AutoNormal(wrong, init_scale=1.0)
        with pytest.raises(ValueError, match=rf"the site 'y' has shape {shape} and differs"):
            check_vectorized(wrong, guide, *args, num_particles=4)


def test_vectorized_check_needs_two_particles() -> None:
    with pytest.raises(ValueError, match="num_particles is 1; a check needs at least 2"):
        check_vectorized(wrong_matmul, AutoNormal(wrong_matmul), num_particles=1)
