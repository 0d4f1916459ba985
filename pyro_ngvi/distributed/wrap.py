"""Which SVI runs on several processes, and which does not."""

from __future__ import annotations

from collections.abc import Sequence

from pyro.infer import (
    SVI,
    EnergyDistance,
    RenyiELBO,
    ReweightedWakeSleep,
    Trace_MMD,
    TraceTailAdaptive_ELBO,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..optim.host import describe
from ..optim.rule import require
from .processes import check_connected
from .svi import DistributedSVI, SitesSVI, UnitsSVI

#: losses that are not linear in log p, so that means over ranks are not theirs
NOT_LINEAR = (RenyiELBO, ReweightedWakeSleep, TraceTailAdaptive_ELBO, EnergyDistance, Trace_MMD)


def wrap(
    svi: SVI,
    plates: Sequence[str],
    *,
    scaled_to: str | None = None,
    own_noise: bool | None = None,
    check_every: int = 100,
) -> DistributedSVI:
    r"""An ``SVI`` on several processes, which takes the steps of one process with all data.

    With R ranks, of which number r has the data y_r in the ``plates`` of the model,

        ELBO = 1/R sum_r E_q[R log p(y_r | z) + log p(z) - log q(z)],

    and gradients and curvatures likewise are averaged before the optimizer's step, which is the same on
    all ranks.  With ``plates=[]`` all ranks have all data: R ranks of S particles are R S particles.
    At the first call all ranks take the parameters and the random state of rank 0.

    Not for models whose data fit one process and take a few milliseconds a step; latent sites for each
    datum (in a plate of the shards, which is refused, or in one vector, which cannot be seen);
    likelihoods that are no product over the rows of the shards; losses that are not linear in log p.
    Of :class:`~pyro_ngvi.AutoHierarchical` each rank has units of its own, whose plate ``plates`` name.
    Of :class:`~pyro_ngvi.AutoSites` each rank has the sites of its rows, and the guide sums what they
    say: not in lists of guides, for processes and chains, nor while parameters are learned.

    Args:
        svi: with any guide, loss and optimizer but those above.
        plates: names of the plates that hold the shards; ``[]``: all ranks have the same data.
        scaled_to: for minibatches and other scales in them, whether they lead to the "whole"
            (``plate("data", N, subsample=...)``, N of all ranks), or to the "shard" of a rank.
        own_noise: whether each rank draws particles of its own; by default only where all have the
            same data.
        check_every: steps between comparisons of parameters, optimizer and random state of all ranks;
            also after steps 1, 2, 4, 8, ...

    Raises:
        RuntimeError: where processes are not connected; at a step, where a rank is gone, is at another
            call, or has come apart from the others.
        ValueError: for what is named above; at the first step, where ranks have different models or a
            scale is not explained.

    Source: sums before the step as in synchronous partitioned VI (Bui et al. 2018, arXiv:1811.11206).

    Example (the same script on each rank, ``torchrun --nproc-per-node 2 script.py``):
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> ngvi.distributed.connect()
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> guide = ngvi.AutoFullRankNormal(model, init_loc_fn=ngvi.guides.init_to_center)  # at 0
        >>> svi = pyro.infer.SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
        >>> svi = ngvi.distributed.wrap(svi, plates=["data"])
        >>> y = ngvi.distributed.shard(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        >>> losses = [svi.step(y) for _ in range(100)]
        >>> round(guide.median()["mu"].item(), 1)
        2.5
    """
    check_connected()
    if not isinstance(svi, SVI) or type(svi).step is not SVI.step:
        raise ValueError(
            f"distributed.wrap takes a plain pyro.infer.SVI, got {type(svi).__name__}. Wrap before "
            f"anything else; compiled steps run on one process."
        )
    require(not isinstance(plates, str), "plates", "be a list of names", plates)
    valid = scaled_to in (None, "whole", "shard")
    require(valid, "scaled_to", "be 'whole', 'shard' or None", scaled_to)
    require(check_every >= 1, "check_every", "be at least 1", check_every)
    modules = [m for m in (svi.model, svi.guide) if isinstance(m, nn.Module)]
    parts = [part for module in modules for part in module.modules()]
    if any(isinstance(part, DistributedDataParallel) for part in parts):
        raise ValueError(
            "distributed.wrap: a DistributedDataParallel module averages gradients behind the "
            "optimizer's back, and not curvature. Pass the module within it, its attribute module."
        )
    kinds = {"holds_sites": SitesSVI, "draw_units": UnitsSVI}
    kind = next((k for what, k in kinds.items() if hasattr(svi.guide, what)), DistributedSVI)
    held = [what for what, k in kinds.items() if k is not kind]
    if any(hasattr(part, what) for part in parts for what in held):
        raise ValueError(
            f"distributed.wrap: {describe(svi.guide)} has parts that hold numbers for each unit or "
            f"datum. Take one such guide alone, pyro_ngvi.AutoFullRankNormal, or one process."
        )
    loss = getattr(svi.loss_and_grads, "__self__", None)
    if plates and isinstance(loss, NOT_LINEAR):
        raise ValueError(
            f"distributed.wrap: {type(loss).__name__} is not linear in log p: means over shards are "
            f"not those of all data. Take an ELBO, or all data on all ranks with plates=[]."
        )
    own_noise = not plates if own_noise is None else own_noise
    return kind(svi, plates, scaled_to, own_noise, check_every)
