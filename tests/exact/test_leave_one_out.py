"""Cavities, leave-one-out densities and influence against closed forms of Gaussian models."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_ngvi import CVI, AutoSites, SitesELBO
from pyro_ngvi.distributions import GaussianProcess, local_level
from pyro_ngvi.linalg.spectral import square_root
from pyro_ngvi.sites.algebra import potential_of
from pyro_ngvi.sites.dense import remainders
from pyro_ngvi.sites.leave_one_out import divide_out
from pyro_ngvi.sites.structure import LinearMap
from tests.exact.site_models import all_but, cases, gap

both = pytest.mark.parametrize("name", ["regression", "pairs"])
#: with 2 data the guide keeps the directions that these see only
sizes = pytest.mark.parametrize("N", [12, 2])


def random_marginals(n: int, k: int, rank: int) -> tuple[Tensor, Tensor]:
    half = torch.randn(n, k, rank)
    return torch.randn(n, k), half @ half.mT


@pytest.mark.parametrize(("k", "rank"), [(1, 1), (2, 2), (3, 3), (3, 1), (4, 2)])
def test_cavity_times_site_is_q(k: int, rank: int) -> None:
    """Sites of any sign, in the directions that C has: 1e-12 in natural parameters of these."""
    mean, C = random_marginals(200, k, rank)
    nu, Lambda = torch.randn(200, k), torch.randn(200, k, k)
    Lambda = 0.1 * (Lambda + Lambda.mT) / C.diagonal(dim1=-2, dim2=-1).sum(-1).reshape(-1, 1, 1)
    at = divide_out(mean, C, nu, Lambda)
    assert at.proper.all()
    # q = cavity * site: C = (I + C_ Lambda)^-1 C_, m = (I + C_ Lambda)^-1 (m_ + C_ nu)
    back = torch.eye(k) + at.covariance @ Lambda
    again = torch.linalg.solve(back, at.covariance)
    there = at.mean + (at.covariance @ nu.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(again, C, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.linalg.solve(back, there), mean, rtol=1e-11, atol=1e-12)


def test_improper_cavity_is_nan_and_others_are_not() -> None:
    one = torch.ones(4, 1, 1)
    Lambda = torch.tensor([0.5, 1.0, 1.5, torch.nan]).reshape(4, 1, 1)  # C^-1 is 1
    at = divide_out(one[:, 0], one, one[:, 0], Lambda)
    assert at.proper.tolist() == [True, False, False, False]
    for figure in (at.mean, at.covariance, at.move, at.pull, at.distance, at.kl):
        assert figure.flatten(0).isnan().tolist() == [False, True, True, True]
    assert at.covariance[0].item() == pytest.approx(2.0, abs=1e-15)


def test_square_root_of_a_singular_matrix() -> None:
    _, C = random_marginals(50, 4, 2)
    S = square_root(C)
    torch.testing.assert_close(S @ S.mT, C, rtol=1e-13, atol=1e-13)


@both
@sizes
def test_loo_and_influence_are_exact_for_gaussian_data(name: str, N: int) -> None:
    case = cases(N)[name]
    every = torch.arange(N)
    guide, _ = case.fit(every)
    full, loo, influence = case.posterior(every), guide.loo(), guide.influence()
    assert gap(guide, full) < 1e-10
    shift, P = influence.shift(), full.precision_matrix
    gained = 0.0
    for n in range(N):
        q = case.posterior(all_but(N, n))
        expected = case.log_predictive(n, q)
        gained += float(case.log_predictive(n, full) - expected)
        assert loo.pointwise["y"][n].item() == pytest.approx(expected.item(), abs=1e-10)
        d = full.mean - q.mean
        torch.testing.assert_close(shift[n], d, rtol=0, atol=1e-10)
        assert influence.distance[n].item() == pytest.approx((d @ P @ d).sqrt().item(), abs=1e-10)
        assert influence.kl[n].item() == pytest.approx(kl_divergence(q, full).item(), abs=1e-10)
        torch.testing.assert_close(influence.prediction[n], case.A[n] @ d, rtol=0, atol=1e-10)
    assert loo.elpd == pytest.approx(float(loo.pointwise["y"].sum()), abs=1e-12)
    assert loo.se == pytest.approx(float((N * loo.pointwise["y"].var(correction=0)).sqrt()))
    assert loo.p_loo == pytest.approx(gained, abs=1e-9)
    assert (loo.improper, loo.absent, loo.count) == (0, 0, N)
    assert f"elpd_loo {loo.elpd:.2f} nats" in str(loo) and f"of {N} data" in str(loo)
    assert torch.equal(influence.shift([1, 0]), shift[[1, 0]])
    assert influence.most(2).tolist() == influence.distance.argsort(descending=True)[:2].tolist()


@both
def test_influence_of_sets_is_that_of_fits_without_them(name: str) -> None:
    """Smaller sets than the block, and larger ones, which take another way; a mask counts too."""
    N = 12
    case = cases(N)[name]
    every = torch.arange(N)
    guide, _ = case.fit(every)
    full = case.posterior(every)
    mask = torch.zeros(N, dtype=torch.bool)
    mask[[0, 11]] = True
    sets: list[Any] = [[3], torch.tensor([5, 1]), mask, every[2:11]]
    found = guide.influence(groups=sets)
    single = guide.influence()
    for i, out in enumerate(sets):
        index = out.nonzero().squeeze(-1) if out is mask else out
        refit, _ = case.fit(all_but(N, index))
        q = refit.get_posterior()
        d = full.mean - q.mean
        torch.testing.assert_close(found.shift(i)[0], d, rtol=0, atol=1e-10)
        length = (d @ full.precision_matrix @ d).sqrt().item()
        assert found.distance[i].item() == pytest.approx(length, abs=1e-10)
        assert found.kl[i].item() == pytest.approx(kl_divergence(q, full).item(), abs=1e-10)
        expected = case.A[index] @ d
        torch.testing.assert_close(found.prediction[i], expected, rtol=0, atol=1e-10)
    assert found.distance[0].item() == pytest.approx(single.distance[3].item(), abs=1e-12)


def test_densities_of_another_likelihood_by_a_fine_grid() -> None:
    """The quadrature of loo() against a trapezium rule, with the cavity 1 / (1 / C - Lambda)."""

    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    X = torch.randn(30, 2)
    y = (torch.rand(30) < torch.sigmoid(X.sum(1))).double()
    guide = AutoSites(model)
    svi = SVI(model, guide, CVI(guide), SitesELBO())
    for _ in range(20):
        svi.step(X, y)
    q, site = guide.get_posterior(), guide.sites()["y"]
    C = torch.einsum("nd,de,ne->n", X, q.covariance_matrix, X)
    cavity = 1 / (1 / C - site.precision[:, 0, 0])
    m = cavity * (X @ q.mean / C - site.linear[:, 0])
    f = m + cavity.sqrt() * torch.linspace(-9.0, 9.0, 4001).unsqueeze(-1)
    log_p = dist.Normal(m, cavity.sqrt()).log_prob(f) + dist.Bernoulli(logits=f).log_prob(y)
    expected = torch.trapezoid(log_p.exp(), f, dim=0).log()
    torch.testing.assert_close(guide.loo().pointwise["y"], expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(site.mean * site.precision[:, 0], site.linear, rtol=1e-12, atol=0)


def test_missing_and_masked_data_have_no_density() -> None:
    case = cases()["regression"]
    y = case.y.clone()
    y[2] = torch.nan
    masked: Any = torch.ones(12, dtype=torch.bool)
    masked[7] = False

    def model(X: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 0.7).to_event(1))
        with pyro.plate("data", len(X)), pyro.poutine.mask(mask=masked):
            pyro.sample("y", dist.Normal(X @ w + b, 0.3), obs=y)

    guide = AutoSites(model)
    SVI(model, guide, CVI(guide), SitesELBO()).step(case.X, y)
    loo, reference = guide.loo(), case.fit(all_but(12, [2, 7]))[0].loo()
    assert loo.pointwise["y"].isnan().nonzero().squeeze(-1).tolist() == [2, 7]
    assert (loo.absent, loo.improper, loo.count) == (2, 0, 10)
    assert loo.elpd == pytest.approx(reference.elpd, abs=1e-10)
    assert loo.se == pytest.approx(reference.se, abs=1e-10)
    assert "2 missing" in str(loo)


def test_improper_cavity_leaves_no_elpd() -> None:
    case = cases()["regression"]
    case.X[5] = case.X[4]
    guide, _ = case.fit(torch.arange(12))
    with torch.no_grad():  # 5 sees what 4 sees, with a site of negative precision
        _, precision = guide.site_tensors()["y"]
        precision.zero_()
        precision[4], precision[5] = 5.0, -3.0
    loo, influence = guide.loo(), guide.influence()
    assert loo.improper == 1 and loo.elpd != loo.elpd and loo.se != loo.se
    assert loo.pointwise["y"].isnan().nonzero().squeeze(-1).tolist() == [4]
    assert "1 of 12 data have a cavity" in str(loo)
    assert influence.improper == 1 and influence.most(1).tolist() == [4]
    assert "1 leave no proper Gaussian" in str(influence)


def _smooth(dtype: torch.dtype, sd: float, jitter: float) -> tuple[AutoSites, Tensor]:
    """A Gaussian process of 20 data with almost no noise, and their exact densities."""
    generator = torch.Generator().manual_seed(1)
    x = 10.0 * torch.rand(20, generator=generator).sort().values
    y = (x.sin() + sd * torch.randn(20, generator=generator)).to(dtype)

    def kernel(X: Tensor, Z: Tensor | None = None, diag: bool = False) -> Tensor:
        if diag:
            return 2.0 * torch.ones_like(X)
        return 2.0 * torch.exp(-0.5 * ((X[:, None] - (X if Z is None else Z)) / 1.5) ** 2)

    def model(X: Tensor, y: Tensor) -> None:
        f = pyro.sample("f", GaussianProcess(kernel, X, jitter=jitter))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(f, sd), obs=y)

    guide, x = AutoSites(model), x.to(dtype)
    SVI(model, guide, CVI(guide), SitesELBO()).step(x, y)
    P = torch.linalg.inv(kernel(x.double()) + (jitter + sd**2) * torch.eye(20))
    mean, variance = y.double() - (P @ y.double()) / P.diagonal(), P.diagonal().reciprocal()
    return guide, dist.Normal(mean, variance.sqrt()).log_prob(y.double())


def test_loo_of_almost_no_noise_keeps_its_digits() -> None:
    """1 - Lambda C is 4e-10, and C is known to 5e-9 of itself.  In float32 roundings of K count: 1e-7
    beside a jitter of 1e-4."""
    guide, expected = _smooth(torch.float64, 2e-8, 1e-6)
    torch.testing.assert_close(guide.loo().pointwise["y"], expected, rtol=0, atol=1e-6)
    assert guide.influence().improper == 0
    torch.set_default_dtype(torch.float32)
    for sd in (5e-4, 1e-5):
        guide, expected = _smooth(torch.float32, sd, 1e-4)
        found = guide.loo()
        assert found.lost == 0
        torch.testing.assert_close(found.pointwise["y"].double(), expected, rtol=0, atol=5e-3)


def test_remainders_are_those_of_a_subtraction() -> None:
    """Of two groups that see the same block, and sites of either sign or of none."""
    A, B, R = torch.randn(6, 1, 5), torch.randn(3, 2, 5), torch.eye(5)
    maps = {"a": LinearMap(A, torch.randn(6, 1)), "b": LinearMap(B, torch.randn(3, 2))}
    half = 0.3 * torch.randn(3, 2, 2)
    signs = torch.tensor([1.0, -0.01, 0.0, 2.0, 1.0, 0.5]).reshape(6, 1, 1)
    sites = {"a": (torch.randn(6, 1), signs), "b": (torch.randn(3, 2), half @ half.mT)}
    both = potential_of(maps["a"], *sites["a"]).plus(potential_of(maps["b"], *sites["b"]))
    C = torch.linalg.inv(R + both.precision)
    mean = A @ (C @ both.linear) + maps["a"].offset
    found = remainders(maps, sites, "a", 12)
    assert found is not None and remainders(maps, sites, "a", 11) is None
    M, g, _ = found
    torch.testing.assert_close(M, 1.0 - signs * (A @ C @ A.mT), rtol=0, atol=1e-12)
    torch.testing.assert_close(g, sites["a"][0] - signs[:, :, 0] * mean, rtol=0, atol=1e-12)


def test_densities_of_which_no_digit_is_left_are_lost() -> None:
    y = torch.cumsum(0.5 * torch.randn(20), 0).float()
    torch.set_default_dtype(torch.float32)

    def chain(y: Tensor, sd: float) -> None:
        z = pyro.sample("z", local_level(20, initial_scale=1.0, step_scale=0.5))
        with pyro.plate("t", 20):
            pyro.sample("y", dist.Normal(z[:, 0], sd), obs=y)

    def loo(sd: float) -> Any:
        guide = AutoSites(chain)
        SVI(chain, guide, CVI(guide), SitesELBO()).step(y, sd)
        return guide.loo()

    fine, lost = loo(0.05), loo(2e-4)
    assert (fine.lost, fine.improper) == (0, 0) and "elpd_loo" in str(fine)
    assert lost.lost > 0 and lost.improper == 0 and lost.elpd != lost.elpd
    assert int(lost.pointwise["y"].isnan().sum()) == lost.lost
    assert f"the digits of {lost.lost} of 20 data are lost in torch.float32" in str(lost)


def test_state_space_prior_has_the_densities_of_its_gaussian() -> None:
    T, sd = 20, 0.4
    y = torch.cumsum(0.3 * torch.randn(T), 0) + sd * torch.randn(T)

    def chain(y: Tensor) -> None:
        z = pyro.sample("z", local_level(len(y), initial_scale=1.0, step_scale=0.3))
        with pyro.plate("t", len(y)):
            pyro.sample("y", dist.Normal(z[:, 0], sd), obs=y)

    guide = AutoSites(chain)
    SVI(chain, guide, CVI(guide), SitesELBO()).step(y)
    t = torch.arange(T).double()
    K = 1.0 + 0.09 * torch.minimum(t[:, None], t) + sd**2 * torch.eye(T)
    P = torch.linalg.inv(K)
    m, v = y - (P @ y) / P.diagonal(), 1 / P.diagonal()  # Rasmussen & Williams (2006), 5.12
    expected = dist.Normal(m, v.sqrt()).log_prob(y)
    torch.testing.assert_close(guide.loo().pointwise["y"], expected, rtol=0, atol=1e-10)
    moved = torch.stack(list(guide.influence().prediction))[:, 0]
    without = torch.stack([_smoothed(K, y, n, sd) for n in range(T)])
    f = y - sd**2 * (P @ y)
    torch.testing.assert_close(moved, f - without, rtol=0, atol=1e-10)


def _smoothed(K: Tensor, y: Tensor, n: int, sd: float) -> Tensor:
    """E f_n given all data but y_n."""
    index = all_but(len(y), n)
    return K[n, index] @ torch.linalg.solve(K[index][:, index], y[index])


def test_inducing_points_at_the_data_are_the_process() -> None:
    """Predictors have a rest beside what the sites see; at the data's own inputs it is the jitter."""

    def kernel(X: Tensor, Z: Tensor | None = None, diag: bool = False) -> Tensor:
        if diag:
            return torch.ones(len(X))
        return torch.exp(-0.5 * (X[:, None] - (X if Z is None else Z)).square() / 0.3)

    X = torch.linspace(0.0, 4.0, 9)
    y = torch.sin(2 * X)

    def model(X: Tensor, y: Tensor) -> None:
        f = pyro.sample("f", GaussianProcess(kernel, X, jitter=1e-9))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    found = []
    for inducing in (None, X.clone()):
        guide = AutoSites(model, inducing=inducing)
        SVI(model, guide, CVI(guide), SitesELBO()).step(X, y)
        influence = guide.influence()
        found.append((guide.loo().pointwise["y"], influence.distance, influence.shift([2, 5])))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("c", [0.5, 3.0])
def test_leave_one_out_under_a_scale_predicts_the_datum_itself(c: float) -> None:
    """q holds p^c of the others, by conjugate algebra; what it predicts is p."""
    X, y = torch.randn(10, 2), torch.randn(10)

    def model() -> None:
        w: Any = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", 10), pyro.poutine.scale(scale=c):
            pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    guide = AutoSites(model)
    svi = SVI(model, guide, CVI(guide), SitesELBO())
    for _ in range(2):
        svi.step()
    exact = []
    for n in range(10):
        Xn, yn = X[all_but(10, n)], y[all_but(10, n)]
        P = torch.eye(2) + c * Xn.T @ Xn
        mean = X[n] @ torch.linalg.solve(P, c * Xn.T @ yn)
        variance = X[n] @ torch.linalg.solve(P, X[n])
        exact.append(dist.Normal(mean, (1.0 + variance).sqrt()).log_prob(y[n]))
    torch.testing.assert_close(guide.loo().pointwise["y"], torch.stack(exact), rtol=1e-9, atol=1e-9)
