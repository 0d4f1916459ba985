"""The log density of all data, from minibatches one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ..runtime.density import Sites, is_minibatch
from ..runtime.run import Program, look

#: by how much the shares of an epoch may miss one
ROUNDING = 1e-6


class OverBatches:
    """A model of minibatches, for what asks for its log density at all data: k-hat and the ELBO,

        log p(y, z) = sum_b s_b log p_b(y_b, z),      s_b = M_b / N,

    where log p_b has the prior once and the likelihood of the M_b data of minibatch b times N / M_b, as
    Pyro's subsampled plates do; over an epoch the s_b sum to one.

    Pass it as the model to :func:`pyro_ngvi.khat` or :func:`pyro_ngvi.to_arviz`, with the arguments of
    any one minibatch; what is no part of one goes by keyword.  All draws see every datum in one pass,
    and memory holds one minibatch.  A :class:`~pyro_ngvi.fitting.Fit` of ``data=`` alone does so.

    Not for: what has numbers for each datum, which the container is left without, as it is of
    deterministic sites; other diagnostics; latent variables in the plate of the data.

    Args:
        model: a model whose data stand in one plate, which knows how many there are in all:
            ``pyro.plate("data", N, subsample_size=len(X))`` or ``(..., subsample=index)``.
        batches: a ``DataLoader``, or another iterable that can be gone through again, of tuples of
            arguments or of single ones.

    Raises:
        ValueError: where an epoch has not each datum once, as of samplers with replacement, or a latent
            site stands in the plate.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y):
        ...     m = pyro.sample("m", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", 100, subsample_size=len(y)):
        ...         pyro.sample("y", dist.Normal(m, 1.0), obs=y)
        >>> guide = ngvi.AutoFullRankNormal(model)
        >>> y = torch.linspace(-1.0, 2.0, 100).split(30)
        >>> fit = ngvi.fit(model, data=y, guide=guide, max_steps=60, progress=False, seed=0)
        >>> found = ngvi.khat(ngvi.diagnostics.OverBatches(model, y), guide, y[0], seed=0)
        >>> abs(found.elbo - ngvi.khat(model, guide, torch.cat(y), seed=0).elbo) < 1e-3
        True
    """

    def __init__(self, model: Callable[..., Any], batches: Iterable[Any]) -> None:
        if any(getattr(s, "replacement", False) for s in samplers_of(batches)):
            raise ValueError(
                "The loader draws with replacement: a pass over it has some data twice and others "
                "never. Take one that shuffles without sampler=, or give fit all data as arguments "
                "beside data=."
            )
        self.model, self.batches = model, batches

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def bound(
        self, values: Mapping[str, Tensor], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[float, Program]]:
        """The model of each minibatch, its arguments bound, with its share s_b; the latent sites are at
        ``values`` where the share is looked for."""
        total = 0.0
        for args in map(as_arguments, self.batches):
            model = partial(self.model, *args, **kwargs)
            share = share_of(look(model, values), values)
            total += share
            yield share, model
        if abs(total - 1.0) > ROUNDING:
            raise ValueError(
                f"The minibatches of an epoch hold {total:.4g} times the data of their plate. Give "
                f"each datum once (drop_last=False, no replacement), and the plate the size of all, "
                f"in place of poutine.scale."
            )


def as_arguments(batch: Any) -> tuple[Any, ...]:
    """What an iterable gives, as the arguments of a call."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def samplers_of(batches: Any) -> list[Any]:
    """What a loader takes the numbers of its data from."""
    loader = getattr(batches, "source", batches)
    groups = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), groups, getattr(groups, "sampler", None)]


def need_all_data(model: Any) -> None:
    """Refuse a model of minibatches."""
    if isinstance(model, OverBatches):
        raise ValueError(
            "OverBatches is for khat and to_arviz. What is asked for here needs all data at "
            "once: pass the model itself, its guide and all data."
        )


def share_of(sites: Sites, latent: Collection[str]) -> float:
    """Which share of the data a run of the model has seen; ``latent`` are the sites of the guide."""
    seen = {name: site for name, site in sites.items() if is_minibatch(site)}
    if len(seen) > 1:
        raise ValueError(
            f"Minibatches of the plates {sorted(seen)} at once do not add up to all data. Subsample "
            f"one of them."
        )
    for name, site in sites.items():
        plates = [f.name for f in site["cond_indep_stack"] if f.name in seen]
        if name in latent and plates:
            raise ValueError(
                f"{name!r} is latent in the plate {plates[0]!r} of the minibatches, and has other "
                f"draws in each. Pass all data as arguments of the model."
            )
    return next((len(site["value"]) / site["fn"].size for site in seen.values()), 1.0)
