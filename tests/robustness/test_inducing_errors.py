"""Gaussian processes and inducing points: what is refused, and in which words."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]

import pyro_ngvi as ngvi
from pyro_ngvi.distributions import GaussianProcess, local_level
from tests.exact.process_cases import Matern, data, make_model, trained

Z = torch.linspace(0.1, 4.9, 9, dtype=torch.float64)


def rbf(X, Z=None, diag=False):
    if diag:
        return torch.ones(len(X), dtype=X.dtype)
    return (-0.5 * (X[:, None] - (X if Z is None else Z)).square()).exp()


def step(model, *args, inducing=None, **how):
    guide = ngvi.AutoSites(model, inducing=inducing)
    svi = SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    svi.step(*args, **how)
    return guide, svi


def test_a_mean_of_a_wrong_shape():
    X, _ = data(5)
    with pytest.raises(ValueError, match=r"mean\(inputs\) has shape \(1,\)"):
        GaussianProcess(rbf, X, mean=lambda x: x[:1]).loc  # noqa: B018


def test_a_singular_kernel_matrix_names_the_jitter():
    X = torch.linspace(0, 1, 50)
    f = GaussianProcess(rbf, X.float(), jitter=1e-9)
    with pytest.raises(
        ValueError, match=r"not positive definite in float32 with jitter=1e-09\. Raise"
    ):
        f.rsample()
    assert torch.isfinite(GaussianProcess(rbf, X.float(), jitter=1e-4).rsample()).all()


def test_a_process_in_a_plate_is_refused():
    X, y = data(10)

    def model(X, y):
        with pyro.plate("data", len(X), subsample_size=5) as i:
            f = pyro.sample("f", GaussianProcess(rbf, X[i]))
            pyro.sample("y", dist.Normal(f, 1.0), obs=y[i])

    for inducing in (None, Z):
        with pytest.raises(ValueError, match="Take its site out of the plate"):
            step(model, X, y, inducing=inducing)


def test_minibatches_of_inputs_need_inducing_points():
    X, y = data(20)
    model = make_model(Matern())
    with pytest.raises(ValueError, match=r"'f' is at other inputs in each minibatch.*inducing=Z"):
        step(model, X, y, batch=5)
    _, svi = step(model, X[:10], y[:10])
    with pytest.raises(ValueError, match=r"'f' has the shape \(5,\).*inducing=Z"):
        svi.step(X[:10], y[:10], batch=5)


def test_the_dense_algebra_takes_minibatches_of_the_likelihood():
    """All inputs at every call, some of the data: the same block each time."""
    X, y = data(20)
    kernel = Matern()

    def model(X, y, batch=None):
        f = pyro.sample("f", GaussianProcess(kernel, X))
        with pyro.plate("data", len(X), subsample_size=batch) as i:
            pyro.sample("y", dist.Normal(f[i], 0.5), obs=y[i])

    whole, _ = trained(model, X, y, 1)
    small, _ = trained(model, X, y, 40, batch=10)
    assert (small.site_tensors()["y"][1] > 0).all()  # each datum was seen
    torch.testing.assert_close(small.predict(Z, y)["f"], whole.predict(Z, y)["f"])


def test_the_dense_algebra_learns_priors_with_all_data_only():
    X, y = data(20)
    kernel = Matern(learn=True)

    def model(X, y, batch=None):
        pyro.module("kernel", kernel)
        f = pyro.sample("f", GaussianProcess(kernel, X))
        with pyro.plate("data", len(X), subsample_size=batch) as i:
            pyro.sample("y", dist.Normal(f[i], 0.5), obs=y[i])

    with pytest.raises(ValueError, match=r"has a minibatch, and the prior.*with all data"):
        trained(model, X, y, 1, others=Adam({"lr": 0.01}), batch=5)
    # where f[i] is to be told from f
    guide, _ = trained(model, X, y, 1, others=Adam({"lr": 0.01}))
    with pytest.raises(ValueError, match=r"'f' was the predictor .*\(20,\).*\(5,\).*first call"):
        ngvi.SitesELBO().loss(model, guide, X, y, batch=5)


def test_parameters_that_nobody_learns_are_to_be_held():
    X, y = data(20)
    kernel = Matern(learn=True)
    with pytest.warns(RuntimeWarning, match="hold them by requires_grad_"):
        trained(make_model(kernel), X, y, 1, Z, batch=5)


def test_other_latent_sites_are_refused():
    X, y = data(20)

    def model(X, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        f = pyro.sample("f", GaussianProcess(rbf, X))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(f + w * X, 1.0), obs=y)

    with pytest.raises(ValueError, match=r"has 'w' \(Normal\), 'f' \(GaussianProcess\)"):
        step(model, X, y, inducing=Z)


def test_no_process_at_all():
    def model(y):
        f = pyro.sample("f", dist.Normal(torch.zeros(5), 1.0).to_event(1))
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)

    with pytest.raises(ValueError, match=r"sites are all of them GaussianProcess.*'f' \(Normal\)"):
        step(model, torch.ones(5), inducing=Z)


def test_data_that_see_other_inputs_are_refused():
    X, y = data(20)

    def model(X, y):
        f = pyro.sample("f", GaussianProcess(rbf, X))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(f.flip(0), 1.0), obs=y)

    with pytest.raises(ValueError, match="see 'f' through the result of flip"):
        step(model, X, y, inducing=Z)


def additive(second, seen=lambda f, g: f + g):
    """f at the inputs of the data, and ``second(X, f)``."""

    def model(X, y, batch=None):
        plate = pyro.plate("data", len(X), subsample_size=batch)
        f = pyro.sample("f", GaussianProcess(Matern(), X[plate.indices]))
        g = pyro.sample("g", second(X[plate.indices], f))
        with plate:
            pyro.sample("y", dist.Normal(seen(f, g), 1.0), obs=y[plate.indices])

    return model


@pytest.mark.parametrize(
    "seen",
    [
        lambda f, g: f + g.flip(0),
        lambda f, g: f + g - g.mean(),
        lambda f, g: f + g.roll(1),
        lambda f, g: (f + g)[:1].expand(20),
    ],
)
def test_data_that_see_one_of_several_processes_elsewhere(seen):
    X, y = data(20)
    model = additive(lambda X, f: GaussianProcess(Matern(), X), seen)
    with pytest.raises(
        ValueError, match=r"data of 'y'.* see 'f' and 'g' through .* own input only"
    ):
        step(model, X, y, inducing=Z)


def test_processes_at_other_numbers_or_kinds_of_inputs():
    X, y = data(20)
    fewer = additive(lambda X, f: GaussianProcess(Matern(), X[:5]), lambda f, g: f + g.repeat(4))
    with pytest.raises(ValueError, match=r"'g' have \(5,\) instead of \(20,\)"):
        step(fewer, X, y, inducing=Z)

    def plane(X, Z=None, diag=False):
        return torch.ones(len(X)) if diag else (-torch.cdist(X, X if Z is None else Z)).exp()

    model = additive(lambda X, f: GaussianProcess(plane, X[:, None]))
    with pytest.raises(ValueError, match=r"has shape \(9,\), .*'g' have \(20, 1\)"):
        step(model, X, y, inducing=Z)


@pytest.mark.parametrize(
    "second",
    [
        lambda X, f: GaussianProcess(Matern(), X, mean=f),
        lambda X, f: GaussianProcess(Matern(), X + f),
        lambda X, f: GaussianProcess(lambda *a, **how: (1 + f[0] ** 2) * rbf(*a, **how), X),
    ],
)
def test_processes_that_depend_on_each_other(second):
    X, y = data(20)
    with pytest.raises(
        ValueError, match="prior of the GaussianProcess 'g' depends on the value of"
    ):
        step(additive(second), X, y, inducing=Z)


@pytest.mark.parametrize("seen", [lambda f, i: f[i], lambda f, i: 2 * f[i] + 1])
def test_minibatches_of_a_process_at_all_inputs(seen):
    X, y = data(20)

    def model(X, y, batch=None):
        f = pyro.sample("f", GaussianProcess(Matern(), X))
        with pyro.plate("data", len(X), subsample_size=batch) as i:
            pyro.sample("y", dist.Normal(seen(f, i), 1.0), obs=y[i])

    _, svi = step(model, X, y, inducing=Z)
    with pytest.raises(ValueError, match=r"was the predictor .*\(20,\) for data of shape \(5,"):
        svi.step(X, y, batch=5)
    with pytest.raises(ValueError, match="'f'"):
        step(model, X, y, inducing=Z, batch=5)


@pytest.mark.parametrize("points", [Z[:, None], Z[:0]])
def test_inducing_inputs_of_a_wrong_shape(points):
    X, y = data(20)
    with pytest.raises(ValueError, match=r"inducing has shape .* of the GaussianProcess 'f' have"):
        step(make_model(Matern()), X, y, inducing=points)


def test_predictions_before_the_first_call():
    guide = ngvi.AutoSites(make_model(Matern()))
    with pytest.raises(RuntimeError, match="does not know the model's sites yet"):
        guide.predict(Z)


@pytest.mark.parametrize("kind", ["process", "chain"])
def test_a_prior_that_depends_on_other_latent_sites_is_refused(kind):
    X, y = data(20)

    def model(X, y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        if kind == "process":
            kernel = lambda *args, **how: scale * rbf(*args, **how)  # noqa: E731
            f = pyro.sample("f", GaussianProcess(kernel, X))
        else:
            f = pyro.sample("f", local_level(len(X), scale, scale))[:, 0]
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)

    guide = AutoGuideList(model)
    inducing = Z if kind == "process" else None
    guide.append(ngvi.AutoSites(pyro.poutine.block(model, hide=["scale"]), inducing=inducing))
    guide.append(ngvi.AutoMeanFieldNormal(pyro.poutine.block(model, expose=["scale"])))
    with pytest.raises(ValueError, match="the prior of 'f' depends on a latent site outside"):
        guide(X, y)
