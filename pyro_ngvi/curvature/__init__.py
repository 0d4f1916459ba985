"""Expected curvatures that a loss leaves for its optimizer: one function each, in one table.

Example:
    Squares of single data's gradients, by one backward pass for each datum.

    >>> import pyro, torch, pyro.distributions as dist
    >>> import pyro_ngvi as ngvi
    >>> from pyro_ngvi.curvature import ESTIMATORS
    >>> def empirical_fisher(drawn):
    ...     def squares(t):
    ...         J = torch.func.jacrev(lambda t: drawn.data(t)[0])(t)
    ...         return drawn.data(t)[1] @ J.square()
    ...     return {"diagonal": drawn.average(squares) + drawn.rest_curvature()}
    >>> ESTIMATORS["empirical_fisher"] = empirical_fisher
    >>> def model(y):
    ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
    >>> guide = ngvi.AutoMeanFieldNormal(model)
    >>> loss = ngvi.BatchedELBO(8, curvature="empirical_fisher")
    >>> svi = pyro.infer.SVI(model, guide, ngvi.optim.VON(guide), loss)
    >>> for _ in range(100):
    ...     _ = svi.step(torch.tensor([1.0, 2.0, 3.0]))
    >>> round(guide.median()["mu"].item(), 1)
    2.0
    >>> _ = ESTIMATORS.pop("empirical_fisher")
"""

from .estimators import ESTIMATORS, Drawn

__all__ = ["ESTIMATORS", "Drawn"]
