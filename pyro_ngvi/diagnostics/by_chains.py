r"""Where short Markov chains lead that start at draws of a guide, and how far that is.

Hamiltonian Monte Carlo leaves the posterior as it is, so where the guide is wrong its draws move, also
where importance weights see nothing (Wang, Kasprzak & Huggins, "A targeted accuracy diagnostic for
variational approximations", AISTATS 2023).  With x_0 the draws, x_T those after T steps, and rho their
correlation, an entry whose chain is linear has

    E x_T - mu = rho (E x_0 - mu),    Var x_T - v = rho^2 (Var x_0 - v),                             (1)

mu and v of the posterior, for which :func:`diagnose` solves, rho cut to [0, 0.7].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..runtime.density import feasible_value
from ..runtime.model_density import ModelDensity
from .by_weights import by_weights
from .chains import ADAPTING, KEPT, run_chains
from .diagnosis import Diagnosis
from .draws import MOST_DOUBLES, guide_draws, random_state
from .khat import KHat
from .moved import Moved, by_site, derived, moved, values_at
from .over_batches import need_all_data
from .verdict import khat

#: chains that tell something (k-hat alone judges a mode of a mixture with fewer), and times as many
#: where the errors of these leave a site undecided
FEWEST_CHAINS, MORE_CHAINS = 50, 4


def diagnose(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_chains: int = 1000,
    num_steps: int = 12,
    seed: int | None = 0,
    **kwargs: Any,
) -> Diagnosis:
    """Whether to believe a trained guide, by short chains from its draws: bounds on errors of means and
    sds of every site, as it is and unconstrained, where k-hat tells of the joint distribution alone.

    Hamiltonian Monte Carlo of T steps leads draws to their last four states, and equation (1) of
    :mod:`pyro_ngvi.diagnostics.by_chains` from both to the posterior (Wang, Kasprzak & Huggins 2023,
    AISTATS, for the idea).

    Not where ``16 * num_steps`` gradients for all chains at once cost too much, nor for several modes,
    between which short chains do not go (those of an :class:`~pyro_ngvi.AutoMixtureNormal` have their
    own, and k-hat judges their shares), nor for the neck of a funnel.  An
    :class:`~pyro_ngvi.AutoHierarchical`, and an :class:`~pyro_ngvi.AutoFullRankNormal` of up to 20
    latent variables, is judged by weights of corrected draws where these can be relied on, without
    gradients; of a hierarchy they see such necks.

    Args:
        model: the Pyro model.
        guide: any trained Pyro guide of it.
        args: those of both, and ``kwargs``: the full data.
        num_chains: at least 50; up to four times as many where these leave a site undecided.
        num_steps: T, at least 5, of which the first four adapt the length of leaps.
        seed: makes the result repeatable; ``None`` for the global random state.

    Raises:
        ValueError: as :func:`pyro_ngvi.khat`; for fewer than 50 chains or 5 steps; of minibatches.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> model, narrow = (lambda s=s: pyro.sample("z", dist.Normal(0.0, s)) for s in (1.0, 0.4))
        >>> diagnose(model, model).decision, diagnose(model, narrow).decision
        ('intervals', 'unusable')
    """
    if num_chains < FEWEST_CHAINS or num_steps <= ADAPTING:
        raise ValueError(
            f"diagnose needs at least {FEWEST_CHAINS} chains and {ADAPTING + 1} steps."
        )
    need_all_data(model)
    weights = khat(model, guide, *args, seed=seed, **kwargs)
    how: Any = model, guide, args, kwargs, weights
    found = by_weights(*how, num_draws=num_chains // 2, seed=seed)
    return found or by_chains(*how, num_chains=num_chains, num_steps=num_steps, seed=seed)


def by_chains(
    model: Any,
    guide: Any,
    args: Any,
    kwargs: Any,
    weights: KHat,
    num_chains: int = 1000,
    num_steps: int = 12,
    seed: int | None = 0,
) -> Diagnosis:
    """As :func:`diagnose`, by chains, of a guide with these ``weights``."""
    with random_state(seed, stream=2):
        drawn = partial(guide_draws, partial(guide, *args, **kwargs))
        values, _ = drawn(num_chains)

        def at_draw(site: Any) -> Tensor:
            """Where the model runs for sure; in the middle of all supports it may be NaN."""
            return values[site["name"]][0] if site["name"] in values else feasible_value(site)

        density = ModelDensity(model, args, kwargs, init_loc_fn=at_draw)
        draws, modes_at = density.pack(values).detach(), getattr(guide, "modes_at", _one_mode)
        more = min(MORE_CHAINS * num_chains, MOST_DOUBLES // draws.shape[1]) - num_chains
        if more > 0:
            draws = torch.cat([draws, density.pack(drawn(more)[0]).detach()])
        judged_by = partial(_by_chains, density, draws, modes_at, num_steps, weights)
        found = judged_by(num_chains)
        return judged_by(len(draws)) if found.is_undecided and more > 0 else found


def _one_mode(x: Tensor) -> Tensor:
    return x.new_zeros(len(x))


def _by_chains(
    density: ModelDensity, draws: Tensor, modes_at: Any, num_steps: int, weights: KHat, chains: int
) -> Diagnosis:
    """What chains say from the first of draws (S, d) of a guide, each in its mode ``modes_at(x)``."""
    start, rest = draws[:chains], draws[chains:]
    counts = modes_at(start).unique(return_counts=True)
    modes = [int(m) for m, count in zip(*counts, strict=True) if count >= FEWEST_CHAINS]
    if len(modes) < 2:
        modes, modes_at = [0], _one_mode
    pairs, accepted = [], 0.0
    for mode in modes:
        own = start[modes_at(start) == mode]
        last, share = run_chains(density, own, num_steps)
        stays = modes_at(last[-1]) == mode
        stays |= stays.sum() < FEWEST_CHAINS  # they are of one mode
        own, last = own[stays], last[:, stays].flatten(0, 1)
        before = torch.cat([own, rest[modes_at(rest) == mode]])
        pairs.append((before, last, partial(moved, chains=len(own))))
        accepted += share / len(modes)
    with torch.no_grad():
        by_mode = [by_site(density.layout, *pair) for pair in pairs]
        latent, few = density.layout.transforms, MOST_DOUBLES // (KEPT * len(draws))
        names = [n for n, x in weights.shifts.items() if n not in latent and x.mean.size <= few]
        for (sites, _), (*pair, how) in zip(by_mode, pairs, strict=True) if names else ():
            before, after = (values_at(density.program, names, density.unpack(x)) for x in pair)
            sites |= derived(before, after, how)
    sites, unconstrained = (
        {name: Moved.of_modes([mode[name] for mode in each]) for name in each[0]}
        for each in zip(*by_mode, strict=True)
    )
    kept = weights.decision == "unusable"  # they stand in for weights
    at_end = density.unpack(torch.cat([last for _, last, _ in pairs])) if kept else None
    return Diagnosis(sites, unconstrained, weights, accepted, len(modes), ends=at_end)
