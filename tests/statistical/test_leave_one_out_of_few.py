"""``fit.loo()`` against exact sums: of a few data, and of cells with a few data each."""

import warnings
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_ngvi as ngvi


def share(y: Tensor, a: float) -> None:
    p = pyro.sample("p", dist.Beta(a, a))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(p), obs=y)


@pytest.mark.parametrize(("a", "y"), [(0.2, [0.0, 1.0, 1.0]), (0.3, [0.0, 1.0]), (0.5, [0.0, 1.0])])
def test_without_one_of_a_few_data_tails_are_long(a: float, y: list[float]) -> None:
    """By draws of the guide .3 to .7 nats off, at k-hats of .35 to .62."""
    n, s = len(y), sum(y)
    left_out = [(a + (s if v else n - s) - 1.0) / (2.0 * a + n - 1.0) for v in y]
    fit = ngvi.fit(share, torch.tensor(y), a, seed=0, progress=False)
    assert fit.verdict.ok
    found = fit.loo()
    assert float(found.pareto_k.max()) < 0.7
    assert float(found.loo_i.sum()) == pytest.approx(float(np.log(left_out).sum()), abs=0.1)


def test_the_light_tails_of_a_guide_do_not_hide_what_a_datum_changes() -> None:
    """Logits of 47 cells with four data each, where k-hat is of no use and chains call the guide good
    or all but: its own draws are 17 nats off with no k-hat above .46."""
    random = np.random.default_rng(1)
    J, m, sd = 47, 4, 5.0
    ones = random.integers(1, m, J)
    y = np.concatenate([random.permutation(np.r_[np.ones(s), np.zeros(m - s)]) for s in ones])
    cell, Y = torch.arange(J).repeat_interleave(m), torch.tensor(y)

    def cells(y: Tensor) -> None:
        b: Any = pyro.sample("b", dist.Normal(torch.zeros(J), sd).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=b[cell]), obs=y)

    z = np.linspace(-90.0, 90.0, 18_001)
    log_prior, log_l = -0.5 * (z / sd) ** 2, {0: -np.logaddexp(0, z), 1: -np.logaddexp(0, -z)}
    exact = []
    for own in y.reshape(J, m).astype(int):
        terms = [log_l[v] for v in own]
        both = log_prior + sum(terms)
        whole = np.logaddexp.reduce(both)
        exact += [whole - np.logaddexp.reduce(both - term) for term in terms]

    fit = ngvi.fit(cells, Y, seed=0, progress=False)
    assert fit.diagnosis.ends is not None and fit.khat.decision == "unusable"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = fit.loo()
    k, off = found.pareto_k.values, found.loo_i.values - np.array(exact)
    assert any("Pareto" in str(w.message) for w in told)
    # where a k-hat is good the number is, to three of its standard errors or so
    assert float(np.abs(off[k < 0.5]).max()) < 0.25
    assert abs(float(off.sum())) < 4.0
