"""Products with the Fisher matrix of a guide against its definition, and steps held against the KL."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from pyro.distributions import constraints, transforms
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    init_to_feasible,
)
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.fisher import ConjugateGradients
from pyro_ngvi.fisher.products import SelfDivergence, from_divergence, from_scores, itself
from pyro_ngvi.fisher.scores import GuideScores
from pyro_ngvi.optim.divergence import TOLERANCE, shortened
from pyro_ngvi.optim.rule import Step

D = 3


def model() -> None:
    pyro.sample("x", dist.Normal(torch.zeros(D), 1.0).to_event(1))


def moved(guide: Any) -> GuideScores:
    """A guide whose parameters are not those of its start."""
    pyro.clear_param_store()
    torch.manual_seed(0)
    guide()
    scores = GuideScores(guide)
    with torch.no_grad():
        for p in scores.leaves().values():
            p += 0.3 * torch.randn_like(p)
    return scores


# --- distributions: the Hessian of the KL is E[score score'] = -E[Hessian of log p] ----------------


def simplex() -> Tensor:
    return torch.tensor([0.2, 0.3, 0.5])


#: a distribution of a vector of parameters, and every value it has with its weight, or None: draws
KINDS: dict[str, tuple[Callable[[Tensor], Any], Tensor, Tensor | None]] = {
    "Normal": (lambda t: dist.Normal(t[:2], t[2:].exp()).to_event(1), torch.zeros(4), None),
    "LogNormal": (lambda t: dist.LogNormal(t[0], t[1].exp()), torch.tensor([0.1, -0.3]), None),
    "Gamma": (lambda t: dist.Gamma(t[0].exp(), t[1].exp()), torch.tensor([0.7, 0.2]), None),
    "Beta": (lambda t: dist.Beta(t[0].exp(), t[1].exp()), torch.tensor([0.9, 0.4]), None),
    "Dirichlet": (lambda t: dist.Dirichlet(t.exp()), torch.tensor([0.5, 0.9, 1.2]), None),
    "Exponential": (lambda t: dist.Exponential(t[0].exp()), torch.tensor([0.4]), None),
    "Poisson": (lambda t: dist.Poisson(t[0].exp()), torch.tensor([0.4]), torch.arange(60.0)),
    "Geometric": (lambda t: dist.Geometric(logits=t[0]), torch.tensor([0.4]), torch.arange(400.0)),
    "Bernoulli": (lambda t: dist.Bernoulli(logits=t[0]), torch.tensor([0.4]), torch.arange(2.0)),
    "Categorical": (lambda t: dist.Categorical(logits=t), torch.randn(3), torch.arange(3)),
    "OneHot": (lambda t: dist.OneHotCategorical(logits=t), torch.randn(3), torch.eye(3)),
    "logit-normal": (
        lambda t: dist.TransformedDistribution(
            dist.Normal(t[:2], t[2:].exp()), [transforms.SigmoidTransform()]
        ).to_event(1),
        torch.zeros(4),
        None,
    ),
    "masked": (
        lambda t: dist.Normal(t[:2], 1.0).mask(torch.tensor([True, False])),
        torch.zeros(2),
        None,
    ),
}


def fisher_of(make: Callable[[Tensor], Any], t: Tensor, support: Tensor | None) -> Tensor:
    """-E[Hessian of log p]: a sum over the support, or a mean over draws."""
    q = make(t)
    if support is None:
        z = q.sample((200_000,))
        weights = torch.full((len(z),), 1.0 / len(z))
    else:
        z = support
        weights = q.log_prob(z).exp()

    def expected(s: Tensor) -> Tensor:
        return (weights * per_value(make(s).log_prob(z))).sum()

    hessian: Any = torch.autograd.functional.hessian(expected, t)
    return -hessian


def per_value(log_p: Tensor) -> Tensor:
    return log_p.reshape(len(log_p), -1).sum(1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_curvature_of_the_kl_is_the_fisher_matrix(kind: str) -> None:
    make, start, support = KINDS[kind]
    start = start.double()
    t = start.clone().requires_grad_()
    divergence = itself(make(t))
    assert divergence is not None
    assert divergence.abs().max() < 1e-12
    product = from_divergence(divergence.sum(), [t])
    found = torch.stack([product(row) for row in torch.eye(len(t))])
    with pyro.validation_enabled(False):
        wanted = fisher_of(make, start, support if support is None else support.double())
    # draws: entries of a few units' variance over 2e5 values have standard errors of about 0.005
    tolerance = 1e-8 if support is not None else 0.03
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "fn",
    [
        dist.Laplace(torch.zeros(2), 1.0),  # |x| in the KL has no second derivative where it counts
        dist.MixtureOfDiagNormals(torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2)),
        dist.TransformedDistribution(
            dist.Normal(torch.zeros(2), 1.0), [transforms.AffineTransform(torch.ones(2), 2.0)]
        ),
        dist.TransformedDistribution(
            dist.Normal(torch.zeros(2), 1.0), [transforms.affine_autoregressive(2)]
        ),
        dist.StudentT(3.0, torch.zeros(2)),
    ],
    ids=["Laplace", "mixture", "affine", "flow", "Student"],
)
def test_what_is_not_known_in_closed_form(fn: Any) -> None:
    assert itself(fn) is None
    assert itself(fn.to_event(1) if fn.batch_shape else fn) is None


# --- guides ---------------------------------------------------------------------------------------


def by_hand() -> None:
    loc = pyro.param("loc", torch.zeros(D))
    scale = pyro.param("scale", torch.ones(D), constraint=constraints.positive)
    pyro.sample("x", dist.Normal(loc, scale).to_event(1))


GUIDES: dict[str, Callable[[], Any]] = {
    "AutoNormal": lambda: AutoNormal(model),
    "AutoDiagonalNormal": lambda: AutoDiagonalNormal(model),
    "AutoMultivariateNormal": lambda: AutoMultivariateNormal(model),
    "AutoLowRank": lambda: AutoLowRankMultivariateNormal(model, rank=2),
    "by hand": lambda: by_hand,
}


@pytest.mark.parametrize("kind", GUIDES)
def test_products_of_guides(kind: str) -> None:
    scores = moved(GUIDES[kind]())
    names = list(scores.leaves())
    product = SelfDivergence(scores).product(names)
    assert product is not None
    size = sum(p.numel() for p in scores.leaves().values())
    found = torch.stack([product(row) for row in torch.eye(size)])
    torch.testing.assert_close(found, found.mT, rtol=1e-9, atol=1e-9)
    assert torch.linalg.eigvalsh(found).min() > -1e-9
    rows = torch.cat([scores.draw(500) for _ in range(8)])
    wanted = rows.mT @ rows / len(rows)
    # an entry's standard error is about sqrt(3 F_ii F_jj / 4,000): 0.027 of that unit
    unit = wanted.diagonal().sqrt().clamp_min(1e-9)  # entries of a triangle that are not there
    torch.testing.assert_close(
        found / unit / unit[:, None], wanted / unit / unit[:, None], rtol=0, atol=0.17
    )


@pytest.mark.parametrize("kind", GUIDES)
def test_locations_have_a_block_of_their_own(kind: str) -> None:
    scores = moved(GUIDES[kind]())
    names = list(scores.leaves())
    divergence = SelfDivergence(scores)
    locations = divergence.locations(names)
    assert locations == [name for name in names if "loc" in name.split(".", 1)[-1]] != []
    ordered = [*locations, *(name for name in names if name not in locations)]
    product = divergence.product(ordered)
    assert product is not None
    size = sum(p.numel() for p in scores.leaves().values())
    for row in torch.eye(size)[:D]:
        assert product(row)[D:].abs().max() < 1e-12


def test_sites_that_depend_on_draws_are_averaged_over_runs() -> None:
    def guide() -> None:
        a = pyro.param("a", torch.tensor(0.5))
        scale = pyro.param("scale", torch.tensor(2.0), constraint=constraints.positive)
        x = pyro.sample("x", dist.Normal(1.0, scale))
        pyro.sample("y", dist.Normal(a * x, 0.5))

    scores = moved(guide)
    divergence = SelfDivergence(scores)
    entry, cross = [], []
    for _ in range(100):
        product = divergence.product(["a", "scale"])
        assert product is not None
        row = product(torch.tensor([1.0, 0.0]))
        entry.append(float(row[0]))
        cross.append(float(row[1].abs()))
    assert divergence._runs == 8
    assert max(cross) == 0.0  # draws are held fixed
    scale = float(pyro.param("scale").detach())
    # E[x^2] / 0.25, from 800 squares of variance 2 s^4 + 4 s^2
    wanted = (1.0 + scale**2) / 0.25
    error = (2.0 * scale**4 + 4.0 * scale**2) ** 0.5 / 0.25 / 800**0.5
    assert sum(entry) / len(entry) == pytest.approx(wanted, abs=5.0 * error)
    # a runs nowhere but through the mean of y: its place depends on the draw of x all the same
    assert divergence.locations(["a", "scale"]) == ["a"]


def test_what_places_a_site_together_with_a_weight_is_not_in_the_block_of_locations() -> None:
    def guide() -> None:
        m = pyro.param("m", torch.tensor(0.5))
        value = pyro.param("value", torch.tensor(2.0))
        weight = pyro.param("weight", torch.tensor(3.0), constraint=constraints.positive)
        x = pyro.sample("x", dist.Normal(m, 1.0))
        precision = 1.0 + weight
        pyro.sample("y", dist.Normal((x + value) / precision, precision**-0.5))

    divergence = SelfDivergence(moved(guide))
    product = divergence.product(["value", "weight"])
    assert product is not None
    assert product(torch.tensor([1.0, 0.0]))[1].abs() > 0.01  # an entry of F between the two
    assert divergence.locations(["m", "value", "weight"]) == ["m"]


def test_a_subsampled_plate_counts_in_full() -> None:
    def guide() -> None:
        loc = pyro.param("loc", torch.tensor(0.0))
        with pyro.plate("data", 10, subsample_size=2):
            pyro.sample("z", dist.Normal(loc, 0.5))

    product = SelfDivergence(moved(guide)).product(["loc"])
    assert product is not None
    torch.testing.assert_close(product(torch.ones(1)), torch.tensor([10 / 0.25]))


@pytest.mark.parametrize("kind", [*GUIDES, "flow", "mixture"])
def test_the_divergence_that_steps_are_held_against(kind: str) -> None:
    """In closed form where it is known, else from draws: within five standard errors of that."""

    def mixture() -> None:
        locs = pyro.param("locs", torch.tensor([[-1.0] * D, [1.0] * D]))
        pyro.sample("x", dist.MixtureOfDiagNormals(locs, torch.ones(2, D), torch.zeros(2)))

    further: dict[str, Callable[[], Any]] = {
        "flow": lambda: AutoIAFNormal(model, hidden_dim=[4]),
        "mixture": lambda: mixture,
    }
    scores = moved((GUIDES | further)[kind]())
    then = scores.held(400 if kind == "mixture" else 5_000)  # one by one
    before = then().detach()
    torch.manual_seed(1)
    references = [SelfDivergence(scores).reference() for _ in range(8 if kind == "mixture" else 20)]
    with torch.no_grad():
        assert references[0]().abs() < 1e-12
    # after a small step D is of second order and never negative; after a large one a factor is seen
    for step in (0.05, 0.3):
        with torch.no_grad():
            for p in scores.leaves().values():
                p += step * torch.randn_like(p)
            ratios = before - then()
            values = torch.stack([reference() for reference in references])
        assert values.min() > 0.0
        error = ratios.std() / len(ratios) ** 0.5 + values.std() / len(values) ** 0.5
        assert abs(values.mean() - ratios.mean()) < 5.0 * error + 1e-9


def test_the_divergence_keeps_its_minibatch() -> None:
    def guide() -> None:
        locs = pyro.param("locs", torch.arange(10.0))
        with pyro.plate("data", 10, subsample_size=2) as index:
            pyro.sample("z", dist.Normal(locs[index], 0.5))

    scores = moved(guide)
    divergence = SelfDivergence(scores)
    assert divergence.product(["locs"]) is not None
    for _ in range(5):
        reference = divergence.reference()
        assert reference() == 0.0
        with torch.no_grad():
            scores.leaves()["locs"].add_(0.1)
        # ten of (0.1 / 0.5)^2 / 2, two of them times five
        torch.testing.assert_close(reference().detach(), torch.tensor(0.2))


# --- conjugate gradients --------------------------------------------------------------------------


def positive_definite(n: int) -> Tensor:
    root = torch.randn(n, n)
    return root @ root.mT + torch.eye(n)


def test_enough_iterations_solve_the_system() -> None:
    torch.manual_seed(0)
    F, g = positive_definite(6), torch.randn(6)
    solver = ConjugateGradients(iterations=6)
    state = solver.update(solver.init(g), F.matmul, [2, 4])
    ridge = state["damping"] * state["square"].sqrt()
    import pyro_ngvi.fisher.conjugate as conjugate

    before, conjugate.ENOUGH = conjugate.ENOUGH, 0.0
    try:
        x = solver.solve(state, F.matmul, g, [6])
    finally:
        conjugate.ENOUGH = before
    torch.testing.assert_close(x, torch.linalg.solve(F + ridge.diag(), g))


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_an_early_end_is_the_best_of_its_space(iterations: int) -> None:
    """x'(F + c) x = g'x, and the residual is orthogonal to the space."""
    torch.manual_seed(1)
    F, g = positive_definite(8), torch.randn(8)
    solver = ConjugateGradients(iterations=iterations)
    state = solver.update(solver.init(g), F.matmul, [8])
    x = solver.solve(state, F.matmul, g, [8])
    A = F + (state["damping"] * state["square"].sqrt()).diag()
    torch.testing.assert_close(x @ A @ x, g @ x)
    space = torch.stack([torch.linalg.matrix_power(A, k) @ g for k in range(iterations)])
    torch.testing.assert_close(space @ (g - A @ x), torch.zeros(iterations), rtol=0, atol=1e-8)


def test_blocks_are_solved_by_themselves() -> None:
    torch.manual_seed(2)
    A, B, g = positive_definite(3), positive_definite(5), torch.randn(8)
    F = torch.block_diag(A, B)
    solver = ConjugateGradients(iterations=2)
    state = solver.update(solver.init(g), F.matmul, [3, 5])
    x = solver.solve(state, F.matmul, g, [3, 5])
    alone = solver.solve(state | {"square": state["square"][:3]}, A.matmul, g[:3], [3])
    torch.testing.assert_close(x[:3], alone)


def test_units_are_those_of_each_parameter() -> None:
    F = torch.block_diag(1e-4 * torch.eye(2), 1e4 * torch.eye(3))
    solver = ConjugateGradients()
    state = solver.init(torch.zeros(5))
    for _ in range(3):
        state = solver.update(state, F.matmul, [2, 3])
    torch.testing.assert_close(state["square"].sqrt(), F.diagonal())


def test_damping_rises_and_falls() -> None:
    solver = ConjugateGradients()
    state = solver.init(torch.zeros(2))
    up = solver.adapted(state, torch.tensor(True))["damping"]
    down = solver.adapted(state, torch.tensor(False))["damping"]
    assert float(up / state["damping"]) == pytest.approx(3.0)
    assert float(down / state["damping"]) == pytest.approx(0.8)
    for _ in range(100):
        state = solver.adapted(state, torch.tensor(False))
    assert float(state["damping"]) == pytest.approx(1e-3)


def test_products_with_scores() -> None:
    rows = torch.randn(7, 4)
    broken = torch.cat([rows, torch.full((1, 4), torch.nan)])
    v = torch.randn(4)
    torch.testing.assert_close(from_scores(broken)(v), rows.mT @ rows @ v / 7)


# --- steps held against the KL --------------------------------------------------------------------


def a_step(length: float) -> Step:
    state = {"descent": torch.tensor([3.0]), "reach": torch.tensor([4.0])}
    new = {"x": torch.tensor([length])}
    return Step(new, torch.tensor(length), torch.tensor(1.0), state, damped=torch.tensor(False))


def test_a_step_that_the_metric_describes_is_left_alone() -> None:
    step = a_step(2.0)
    taken, short = shortened(step, {"x": torch.zeros(1)}, lambda new: 0.5 * new["x"].square().sum())
    assert not short and taken.params is step.params
    assert taken.length == 2.0 and taken.state["reach"] == 4.0


@pytest.mark.parametrize("power", [3, 4, 6])
def test_a_step_beyond_the_metric_is_shortened(power: int) -> None:
    """KL = (|x|^2 + |x|^power) / 2 along a step of 5."""

    def divergence(new: dict[str, Tensor]) -> Tensor:
        x = new["x"].abs().sum()
        return 0.5 * (x**2 + x**power)

    taken, short = shortened(a_step(5.0), {"x": torch.zeros(1)}, divergence)
    t = taken.length / 5.0
    assert short and taken.damped
    assert divergence(taken.params) <= TOLERANCE * 0.5 * taken.length**2
    torch.testing.assert_close(taken.params["x"], 5.0 * t[None])
    torch.testing.assert_close(taken.state["descent"], 3.0 * t[None])
    assert float(taken.state["reach"]) == pytest.approx(2.4)


def test_an_infinite_divergence_shortens_too() -> None:
    def divergence(new: dict[str, Tensor]) -> Tensor:
        x = new["x"].abs().sum()
        return torch.where(x < 1.0, 0.5 * x**2, torch.nan)

    taken, short = shortened(a_step(5.0), {"x": torch.zeros(1)}, divergence)
    assert short and 0.0 < taken.length < 1.0


def test_steps_of_a_run_keep_to_the_bound() -> None:
    """Along a run from a far start no step moves q much further than its length says."""
    pyro.clear_param_store()
    torch.manual_seed(3)

    def far() -> None:
        pyro.sample(
            "x", dist.Normal(torch.tensor([30.0, -4.0]), torch.tensor([10.0, 0.1])).to_event(1)
        )

    guide = AutoMultivariateNormal(far, init_loc_fn=init_to_feasible)
    optim = ngvi.IFVB(guide)
    svi = SVI(far, guide, optim, Trace_ELBO(4, vectorize_particles=True))
    svi.step()
    for _ in range(130):
        q: Any = guide.get_posterior()
        loc, factor = q.loc.detach().clone(), q.scale_tril.detach().clone()
        before = td.MultivariateNormal(loc, scale_tril=factor)
        svi.step()
        moved_by = td.kl_divergence(before, guide.get_posterior()).detach()
        length = optim.report("others' guides").step_norm
        assert float(moved_by) <= TOLERANCE * 0.5 * length**2 + 1e-6
    exact = torch.tensor([30.0, -4.0])
    assert ((guide.median()["x"] - exact).abs() < torch.tensor([3.0, 0.03])).all()
