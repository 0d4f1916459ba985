"""What ``fit`` says at its door, before anything is wrong silently."""

from __future__ import annotations

import copy
import functools
from functools import cache
from typing import Any, cast

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import (
    RenyiELBO,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    TraceTMC_ELBO,
)
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor
from torch.distributions import constraints

import pyro_ngvi as ngvi
from pyro_ngvi.fitting.door import check_numbers
from pyro_ngvi.runtime.run import Minibatches

Y = torch.linspace(-1.0, 3.0, 12)
HOW: dict[str, Any] = {"progress": False, "max_steps": 5, "seed": 0}


def model(y: Tensor | None = None, prior: float = 1.0) -> None:
    m = pyro.sample("m", dist.Normal(0.0, torch.tensor(prior)))
    with pyro.plate("data", 12):
        pyro.sample("y", dist.Normal(m, 1.0), obs=y)


@cache
def fitted() -> Any:
    """For tests that do not change it."""
    return ngvi.fit(model, Y, **HOW)


@pytest.mark.parametrize("name", ["prior", "num_steps", "batch_size", "var_name", "from_prior"])
def test_an_argument_that_a_reader_would_take_for_an_option(name: str) -> None:
    """``fit.idata`` would have read the prior's scale as whether to draw of the prior."""
    given: dict[str, Any] = {name: 3.0}

    def takes(y: Tensor, **kwargs: Any) -> None:
        model(y)

    with pytest.raises(ValueError, match=rf"'{name}', an argument of the model, is also an option"):
        ngvi.fit(takes, Y, **given, **HOW)
    fit = ngvi.fit(takes, Y, **HOW)
    with pytest.raises(ValueError, match=rf"functools.partial\(model, {name}=...\)"):
        fit.resume(Y, progress=False, **given)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("num_steps", "max_steps= bounds the run"),
        ("steps", "max_steps= bounds the run"),
        ("time_limit", "max_time= bounds the run"),
        ("batch_size", "data=loader"),
        ("lr", "there is no rate to choose"),
        ("optimizer", "it is called optim="),
    ],
)
def test_names_that_other_libraries_have_for_an_option(name: str, told: str) -> None:
    given: dict[str, Any] = {name: 3}
    with pytest.raises(
        TypeError, match=f"no option '{name}', nor does the model take it: .*{told}"
    ):
        ngvi.fit(model, Y, **given, **HOW)
    with pytest.raises(TypeError, match=f"no option '{name}'"):
        fitted().resume(Y, progress=False, **given)


@pytest.mark.parametrize("name", ["Adam", "adam"])
def test_adam_by_name_is_told_how_it_is_passed(name: str) -> None:
    with pytest.raises(ValueError, match=r"for Adam pass pyro.optim.Adam\("):
        ngvi.fit(model, Y, optim=name, **HOW)


def line(x: Any, y: Any) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


X, ONES = Y[:, None].double(), torch.ones(12).double()


@pytest.mark.parametrize(
    ("x", "y", "named"),
    [
        (X.numpy(), ONES.numpy(), "x y"),
        (pd.DataFrame(X.numpy()), ONES, "x"),
        (X, ONES.numpy(), "y"),
        (X.float(), ONES, "x"),
        (X, ONES.long(), "y"),
        (X, ONES.bool(), "y"),
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_what_torch_does_not_mix_is_named(x: Any, y: Any, named: str, given: bool) -> None:
    how: Any = {**HOW, "guide": "AutoNormal"} if given else HOW
    raised = TypeError, RuntimeError, ValueError
    with pytest.raises(raised) as caught:
        ngvi.fit(line, x, y, **how)
    notes = [n for n in getattr(caught.value, "__notes__", ()) if n.startswith("The argument")]
    assert [note.split("'")[1] for note in notes] == named.split()
    fixed = {"x": x, "y": y}
    for name in named.split():
        call = notes.pop(0).partition(" pass ")[2].rstrip(".")
        fixed[name] = eval(call, {"torch": torch, **fixed})
    assert ngvi.fit(line, fixed["x"], fixed["y"], **how).steps == 5


class Line(torch.nn.Module):
    def forward(self, x: Any, y: Any) -> None:
        line(x, y)


@pytest.mark.parametrize(("model", "name"), [(Line(), "x"), (lambda *args: line(*args), "args[0]")])
def test_arguments_of_modules_and_of_any_number_are_named(model: Any, name: str) -> None:
    with pytest.raises(TypeError) as caught:
        ngvi.fit(model, X.numpy(), ONES, **HOW)
    assert [note.split("'")[1] for note in caught.value.__notes__] == [name]


def test_a_model_that_fails_by_itself_has_no_note() -> None:
    with pytest.raises(RuntimeError) as caught:
        ngvi.fit(line, X.expand(12, 3), ONES.long(), **HOW)
    assert not hasattr(caught.value, "__notes__")
    index: Any = torch.arange(12)
    nothing: Any = None
    with pytest.raises(TypeError, match="unsupported operand type") as failed:
        ngvi.fit(lambda g, y: line(X[g] * nothing, y), index, ONES, **HOW)
    assert not hasattr(failed.value, "__notes__")


def test_predict_of_networks_takes_tensors() -> None:
    net = ngvi.nn.bayesianize(torch.nn.Linear(1, 1).double(), "normal", num_data=12, noise=0.5)
    guide = ngvi.AutoMeanFieldNormal(net)
    guide(X, ONES)
    for x in (X.numpy(), pd.DataFrame(X.numpy())):
        with pytest.raises(TypeError, match=r"x is of type .*pass torch\.(as_)?tensor\(x"):
            ngvi.nn.predict(net, guide, x, ONES)


@pytest.mark.parametrize("reader", [ngvi.khat, ngvi.diagnose, ngvi.to_arviz, ngvi.diagnostics.loo])
def test_a_fit_is_no_guide(reader: Any) -> None:
    with pytest.raises(TypeError, match=r"Fit is no guide. Of a fit give fit.guide"):
        reader(model, fitted(), Y)


def test_the_summary_of_a_fit_is_its_own() -> None:
    assert str(ngvi.summary(fitted())) == str(fitted().summary())


def test_a_name_that_is_elsewhere_says_where() -> None:
    with pytest.raises(AttributeError, match=r"there is pyro_ngvi.diagnostics.loo$"):
        ngvi.loo  # pyright: ignore  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'nowhere'$"):
        ngvi.nowhere  # pyright: ignore  # noqa: B018
    with pytest.raises(ValueError, match="Options of predict are num_samples, sites"):
        fitted().predict(Y, return_sites=["y"])
    with pytest.raises(ValueError, match="IFVB steps a guide, and got dict"):
        ngvi.IFVB({"lr": 0.01})


def test_integers_of_numpy_are_seeds_and_a_rate_is_no_optimizer() -> None:
    fits = [ngvi.fit(model, Y, **HOW | {"seed": cast(Any, seed)}) for seed in (3, np.int64(3))]
    assert (fits[0].losses == fits[1].losses).all()
    assert ngvi.khat(model, fits[0].guide, Y, seed=np.int64(3)).ok  # pyright: ignore
    with pytest.raises(ValueError, match="optim= is an optimizer or a function"):
        ngvi.fit(model, Y, optim=0.01, **HOW)


def test_bound_it_is_the_models() -> None:
    fit = ngvi.fit(functools.partial(model, prior=3.0), Y, **HOW)
    assert "prior" not in fit.idata  # the group
    exact = float(Y.sum() / (12.0 + 1.0 / 9.0))
    assert float(fit.idata["posterior"]["m"].mean()) == pytest.approx(
        exact, abs=4 * 0.29 / 1000**0.5
    )


def test_data_that_are_infinite() -> None:
    y = Y.clone()
    y[[2, 5]] = torch.inf
    with pytest.raises(ValueError, match=r"The site 'y' .*: 2 of its 12 values are infinite. Mask"):
        ngvi.fit(model, y, **HOW)

    def masked(y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 12), pyro.poutine.mask(mask=cast(Any, ~y.isinf())):
            pyro.sample("y", dist.Normal(m, 1.0), obs=torch.where(y.isinf(), 0.0, y))

    assert torch.isfinite(torch.tensor(ngvi.fit(masked, y, **HOW).losses)).all()

    def cut(y: Tensor) -> None:
        """An infinite datum that has a density of its own."""
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 12):
            at_least = torch.where(y.isinf(), 3.0, y)
            pyro.factor("above", dist.Normal(m, 1.0).cdf(-at_least).clamp_min(1e-9).log())

    assert torch.isfinite(torch.tensor(ngvi.fit(cut, y, **HOW).losses)).all()


def test_a_fit_of_no_data_says_so(plain_start: None) -> None:
    assert "no data, so this is the prior" in str(ngvi.fit(model, **HOW))
    assert "no data" not in str(fitted().advice)

    def by_factor() -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        pyro.deterministic("twice", 2.0 * m)
        pyro.factor("likelihood", -(m**2))

    assert "no data" not in str(ngvi.advise(by_factor))
    assert "no data" in str(ngvi.advise(pyro.poutine.block(by_factor, hide=["likelihood"])))


def test_data_at_the_edge_of_their_support_are_named(plain_start: None) -> None:
    def beta(y: Tensor) -> None:
        a: Any = pyro.sample("a", dist.Gamma(torch.tensor(2.0), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("z", dist.Normal(a, 1.0), obs=y)
            pyro.sample("y", dist.Beta(a + 1.0, 2.0), obs=y)

    y = torch.linspace(0.0, 0.9, 20)
    with pytest.warns(RuntimeWarning, match="skipped a step"):
        fit = ngvi.fit(beta, y, progress=False, seed=0)
    assert fit.why_stopped == "diverged"
    assert "at all of them for 1 of 20 values of 'y'. Does the support" in str(fit)


def test_a_fit_whose_guide_was_trained_by_another_is_not_read() -> None:
    """Its draws would be those of the other."""
    guide = ngvi.AutoFullRankNormal(model)
    how: Any = {"progress": False, "seed": 0}
    first = ngvi.fit(model, Y, guide=guide, **how)
    apart = ngvi.fit(model, Y + 5.0, guide=copy.deepcopy(guide), **how)
    mean = float(first.sample(100, seed=0)["m"].mean())
    second = ngvi.fit(model, Y + 5.0, guide=guide, **how)
    for read in (lambda: first.sample(1), lambda: first.idata, lambda: first.predict(None)):
        with pytest.raises(ValueError, match="was given to a later one"):
            read()
    assert float(second.sample(100)["m"].mean()) > mean + 1.0
    assert float(apart.sample(100)["m"].mean()) > mean + 1.0
    first.resume(progress=False)
    assert float(first.sample(100, seed=0)["m"].mean()) == pytest.approx(mean, abs=0.2)
    with pytest.raises(ValueError, match="was given to a later one"):
        second.sample(1)


@pytest.mark.parametrize("missing", [False, True])
def test_residuals_that_a_model_observes_may_overflow_at_draws_of_the_prior(missing) -> None:
    """Only what is the same at two of them is data that somebody can mask."""
    y = torch.linspace(-1.0, 1.0, 60)
    if missing:
        y[3] = torch.nan

    def moving_average(y: torch.Tensor) -> None:
        slope = pyro.sample("slope", dist.Normal(0.0, 1e8))
        error, errors = y[0], [y[0]]
        for now in y[1:]:
            error = now - slope * error
            errors.append(error)
        pyro.sample("error", dist.Normal(torch.zeros(60), 1.0).to_event(1), obs=torch.stack(errors))
        pyro.sample("y", dist.Normal(torch.zeros(60), 1.0).to_event(1), obs=y)

    how: Any = {"guide": "AutoMeanFieldNormal", "max_steps": 1, "progress": False, "seed": 0}
    pyro.clear_param_store()
    if missing:
        with pytest.raises(ValueError, match=r"The site 'y' .*: 1 of its 60 values are NaN. Mask"):
            ngvi.fit(moving_average, y, **how)
    else:
        assert ngvi.fit(moving_average, y, **how).steps == 1


READS: dict[str, Any] = {
    "predict": lambda fit, y: float(fit.predict(y, seed=0)["y"].std()),
    "khat": lambda fit, y: float(fit.khat.elbo),
    "resume": lambda fit, y: float(fit.resume(max_steps=1, progress=False).losses[-1]),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.filterwarnings("ignore:NGVB leaves what is not natural")
def test_parameters_of_the_model_come_back_to_a_store_that_was_cleared(name: str) -> None:
    """Before the first read, whichever that is: the model would make them anew."""
    y = torch.linspace(-1.5, 1.5, 50)

    def scaled(y: Tensor) -> None:
        s = pyro.param("spread", torch.tensor(9.0), constraint=constraints.positive)
        m = pyro.sample("m", dist.Normal(0.0, 10.0))
        with pyro.plate("data", 50):
            pyro.sample("y", dist.Normal(m, s), obs=y)

    found = []
    for cleared in (False, True):
        pyro.clear_param_store()
        fit = ngvi.fit(scaled, y, max_steps=60, tol=0.0, progress=False, seed=0)
        spread = pyro.param("spread").detach().clone()
        assert spread < 8.9
        if cleared:
            pyro.clear_param_store()
        pyro.set_rng_seed(1)
        found.append(READS[name](fit, y))
        torch.testing.assert_close(pyro.param("spread").detach(), spread, rtol=0.02, atol=0.0)
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_fit_takes_gradients_wherever_it_is_called(mode: Any) -> None:
    with mode():
        fit = ngvi.fit(model, Y, **HOW)
    assert fit.losses.tolist() == fitted().losses.tolist()


def hidden(model: Any) -> Any:
    return AutoNormal(poutine.block(model, hide=["k"]))


def mixture(y: Tensor) -> None:
    p: Any = pyro.sample("p", dist.Beta(2.0, 2.0))
    with pyro.plate("data", len(y)):
        k: Any = pyro.sample("k", dist.Bernoulli(p), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(3.0 * k, 1.0), obs=y)


@pytest.mark.parametrize(
    "loss",
    [Trace_ELBO(8), RenyiELBO(), TraceMeanField_ELBO(), TraceGraph_ELBO(), TraceTMC_ELBO()],
    ids=lambda loss: type(loss).__name__,
)
@pytest.mark.parametrize("guide", [None, hidden], ids=["ours", "Pyro's"])
def test_a_loss_that_does_not_sum_out_marked_sites(loss: Any, guide: Any) -> None:
    """p would keep its prior: Pyro draws k from it."""
    guide = None if guide is None else guide(mixture)
    with pytest.raises(ValueError, match=r"does not sum out the site 'k'.*TraceEnum_ELBO\(\)"):
        ngvi.fit(mixture, Y, guide=guide, loss=loss, **HOW)


def test_losses_that_sum_out_marked_sites_or_have_them_in_the_guide() -> None:
    def guide(y: Tensor) -> None:
        pyro.sample("p", dist.Beta(pyro.param("a", torch.ones(())), 2.0))
        with pyro.plate("data", len(y)):
            pyro.sample("k", dist.Bernoulli(logits=pyro.param("l", torch.zeros(12))))

    ngvi.fit(mixture, Y, loss=TraceEnum_ELBO(max_plate_nesting=1), **HOW)
    ngvi.fit(mixture, Y, guide=guide, optim=Adam({"lr": 0.01}), loss=Trace_ELBO(), **HOW)


def test_a_model_whose_log_p_is_random_is_told_and_no_other() -> None:
    """Dropout in training; not minibatches, nor noise that log p does not see."""
    net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.3))

    def noisy(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(8), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(net(x) @ w, 1.0), obs=y)

    def minibatch(y: Tensor, own: bool) -> None:
        m = pyro.sample("m", dist.Normal(torch.randn(()).detach() * 0.0, 1.0))
        pyro.deterministic("noise", torch.randn(()))
        index = torch.randperm(len(y))[:5] if own else None
        with pyro.plate("data", len(y), subsample_size=5, subsample=index) as i:
            pyro.sample("y", dist.Normal(m + y[i], 1.0), obs=torch.ones_like(y)[i])

    x = torch.linspace(-1.0, 3.0, 12).unsqueeze(1)
    with pytest.warns(UserWarning, match=r"log p of 'y' changes .* Call module.eval\(\)") as told:
        ngvi.fit(noisy, x, Y, **HOW)
    assert len(told) == 1 and len(str(told[0].message)) <= 240
    net.eval()
    ngvi.fit(noisy, x, Y, **HOW)  # warnings are errors here
    ngvi.fit(minibatch, Y, True, **HOW)
    with pytest.warns(UserWarning, match="takes 5 of 12 examples at each step") as told:
        fit = ngvi.fit(minibatch, Y, False, **HOW)
    assert len(told) == 1 and "No verdict: The plate 'data' takes 5 of 12" in str(fit)


def test_priors_inside_the_plate_of_the_data_are_told() -> None:
    def inside(y: Tensor, sd: bool) -> None:
        with pyro.plate("data", len(y)):
            m = pyro.sample("m", dist.Normal(0.0, 1.0))
            s = pyro.sample("s", dist.HalfNormal(1.0)) if sd else 1.0
            pyro.sample("y", dist.Normal(m, s), obs=y)

    words = "Each of 12 data has latent variables of its own .'m', 's'., .* before the plate 'data'"
    with pytest.warns(UserWarning, match=words) as told:
        ngvi.fit(inside, Y, True, **HOW)
    assert len(told) == 1 and len(str(told[0].message)) <= 240
    ngvi.fit(inside, Y, False, **HOW)  # one for each, of a known scale, may be meant


def test_minibatches_are_no_data() -> None:
    """Of one row each; the argument of a model may have the name of the option."""

    def model_of(data: Tensor) -> None:
        model(data)

    words = (
        "Minibatches come from a DataLoader .* and this is Tensor. A model takes its data by pos"
    )
    with pytest.raises(ValueError, match=words) as told:
        ngvi.fit(model_of, data=Y, **HOW)
    assert len(str(told.value)) <= 240
    assert ngvi.fit(model_of, Y, **HOW).steps == 5


def test_minibatches_are_no_dicts_of_arguments() -> None:
    def shifted(x: Any, y: Tensor | None = None) -> None:
        model(x["y"] if y is None else y - x)

    with pytest.raises(ValueError, match="names of the model's arguments, as 'x', and"):
        ngvi.fit(shifted, data=[{"x": 0.0, "y": Y}], **HOW)
    # which may be one
    for takes, row in (lambda batch: model(**batch), {"y": Y}), (shifted, {"z": 0.0, "y": Y}):
        assert ngvi.fit(takes, data=[row], **HOW).steps == 5


def test_tensors_of_all_data_are_no_minibatches() -> None:
    def line(x: Tensor, y: Tensor | None = None, size: int | None = None) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with pyro.plate("data", size or len(x), subsample_size=len(x)):
            pyro.sample("y", dist.Normal(m * x, 1.0), obs=y)

    def alone(y: Tensor, size: int | None = None) -> None:
        line(torch.ones_like(y), y, size)

    both = lambda x, y: line(x, y)  # noqa: E731
    data = (torch.linspace(0.0, 2.0, 12), Y)
    for takes in (line, both, functools.partial(line, size=12)):
        with pytest.raises(ValueError, match=r"data= is 2 tensors, .* fit\(model, X, y\)") as told:
            ngvi.fit(takes, data=data, **HOW)
        assert len(str(told.value)) <= 240
    # where the model observes each, they are
    assert ngvi.fit(alone, size=12, data=Y.split(6), **HOW).steps == 5
    assert ngvi.fit(functools.partial(alone, size=12), data=[*Y.split(6)], **HOW).steps == 5


@pytest.mark.filterwarnings("ignore:.*skipped a step|Encountered NaN")
@pytest.mark.parametrize("bad", ["x", "y"])
@pytest.mark.parametrize("optim", [None, Adam({"lr": 0.01})])
def test_nan_in_a_later_minibatch_ends_the_run(bad: str, optim: Any) -> None:
    def line(x: Tensor, y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 12, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(m * x, 1.0), obs=y)

    data = {"x": torch.linspace(0.0, 2.0, 12), "y": Y.clone()}
    data[bad][10] = torch.nan
    words = {"x": "'x' of the model is NaN in 1 of 4 numbers. So log p of 'y' is", "y": "are NaN"}
    batches = [*zip(data["x"].split(4), data["y"].split(4), strict=True)]
    with pyro.validation_enabled(False):
        with pytest.raises(ValueError, match=words[bad]):
            ngvi.fit(line, data=batches, optim=optim, guide="AutoFullRankNormal", **HOW)
    with pytest.raises(ValueError) as told:
        ngvi.fit(line, data["x"], data["y"], guide="AutoFullRankNormal", **HOW)
    assert words[bad].replace("4", "12") in str([told.value, *getattr(told.value, "__notes__", ())])


def test_infinite_numbers_are_named() -> None:
    def mean(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    x, said = X.clone(), "The argument 'x' of the model is infinite in 1 of 12 numbers."
    x[3] = torch.inf
    for model in line, mean:  # one has its density checked, a parameter of the other is no number
        with pytest.raises(ValueError) as told:
            ngvi.fit(model, x, ONES, **HOW)
        assert said in str([told.value, *getattr(told.value, "__notes__", ())])


def test_nan_that_a_model_knows_of_is_taken() -> None:
    def line(x: Tensor, y: Tensor, shift: float = 0.0) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 12):
            pyro.sample("y", dist.Normal(m * x.nan_to_num() + shift, 1.0), obs=y)

    x = torch.linspace(0.0, 2.0, 12)
    x[2] = torch.nan
    assert ngvi.fit(line, x, Y, **HOW).steps == 5
    # nor is it why others are
    assert "y" in check_numbers(line, (x, Y), {"shift": torch.nan}, Minibatches())
