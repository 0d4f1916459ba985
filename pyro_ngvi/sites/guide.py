r"""AutoSites: what a user asks of prior times one Gaussian site per datum, and data that come or go.

Every datum has a site of its own, so taking data G away divides these out:

    q without G   propto   q / prod_(n in G) t_n   =   p prod_(n not in G) t_n,

exact with a Gaussian likelihood.  New data begin with a site of 0.  Not for models whose latent block
has an entry for each datum (a Gaussian process at the data's inputs): without the datum that is another
block, which the next call refuses.  ``reset`` works there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from ..guides.marginals import levels_like, sample_value
from ..linalg.host import outside_autocast
from ..runtime.store import module_name
from .algebra import Snapshot, shallow_copy
from .leave_one_out import Influence, SiteLOO, influence_of, loo_of
from .marginals import SiteMarginals, marginals_of
from .site_guide import SiteGuide
from .structure import Group, Indices, SiteView


class AutoSites(SiteGuide):
    r"""Prior times one Gaussian site per datum: a Gaussian guide for :class:`~pyro_ngvi.CVI`.

    q(z) propto p(z) prod_n exp(nu_n' f_n - f_n' Lambda_n f_n / 2), f_n = A_n z + b_n
    (Khan & Lin 2017; Opper & Archambeau 2009), for any latent block that is jointly Gaussian a priori
    (``Normal``, ``MultivariateNormal``, :class:`~pyro_ngvi.distributions.GaussianProcess`,
    :class:`~pyro_ngvi.distributions.GaussianStateSpace`, and Gaussians given other Gaussians) and any
    likelihood whose datum n depends on k <= 64 linear combinations f_n (k,) of it: regressions,
    Gaussian processes, random effects, time series.  Not for blocks that are not Gaussian (a scale
    with a prior goes to another guide of an ``AutoGuideList``), nor for networks.

    The structure is found by running the model at a few points at the first call, with the data.
    Row n of the data is the same datum at every call: a minibatch, or rows in another order, pass
    their numbers, ``pyro.plate("data", N, subsample=index)``.  After parameters of the model were
    changed by hand, or loaded, call :meth:`refresh`.  Hyperparameters are learned with all data, and
    with inducing points in minibatches too, where q is exact after :meth:`refresh` with all data.
    Data that are NaN are missing: entries of a Normal with ``to_event`` one by one, a row of a
    MultivariateNormal as a whole.  Memory: N k (k + 1) numbers for the sites, and
    O(min(D, N k)^2) for a dense block of D latent variables, O(M^2) with M inducing points (of all
    processes together), O(T) for a state-space prior.

    Args:
        model: a Pyro model.
        latent: name of the site to take as f, latent or ``pyro.deterministic``; found where not given.
        inducing: inputs (M, ...) of inducing points for a latent ``GaussianProcess``, or for several
            that are independent and each at the inputs of the data (softmax classification, a
            location and a log scale, additive models).  A tensor is kept fixed, an ``nn.Parameter``
            is trained with the hyperparameters.
        name: name of the guide in Pyro's parameter store, as for our other guides.  Sites that are
            restored by the store make q anew at the next call, which needs all data.

    Raises:
        ValueError: at the first call, for a model outside the class (a dependence that is not Gaussian,
            not linear or not local), and for a minibatch whose plate has drawn numbers that the model
            does not look at; at later calls for data of another number, out of the support, or that see
            more of the block than those of the first call: a covariate that was 0 in all of these, an
            outcome that was missing in all.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> import pyro_ngvi as ngvi
        >>> def model(y=None):
        ...     m = pyro.sample("m", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", 3 if y is None else len(y)):
        ...         pyro.sample("y", dist.Normal(m, 1.0), obs=y)
        >>> guide = ngvi.AutoSites(model)
        >>> svi = SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
        >>> losses = [svi.step(torch.tensor([1.0, 2.0, 9.0])) for _ in range(3)]
        >>> guide.median(), guide.sites()["y"].precision.shape
        ({'m': tensor(3.)}, torch.Size([3, 1, 1]))
        >>> guide.remove(2)
        >>> guide.median()
        {'m': tensor(1.0000)}
    """

    @outside_autocast
    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latent sites of the block: a dict of values (*shape) by name."""
        # a list of guides may have made plates: a process at their data is drawn there
        plates = getattr(self._holder(), "plates", {}) if self.master is not None else {}
        given = {n: p.indices for n, p in plates.items() if p.subsample_size < p.size}
        call, _ = self._ready(self.call_of(args, kwargs, given=given))
        (site, _), *_ = self.site_tensors().values()
        trap = None
        if self.fresh and torch.is_grad_enabled() and site.requires_grad:
            trap = 0.0 * site.sum()
            trap.register_hook(_refuse_gradient)
        with poutine.block():
            self._create_plates(*args, **kwargs)
        drawn = self.algebra.sample(call, f"_{module_name(self)}")
        # tell the model which data a process was drawn at, by the sites of the plates' indices
        for name, index in call.runner.minibatches.items():
            if self.inducing is not None and name not in given:
                pyro.plate(name, call.sites[name]["fn"].size, subsample=index)
        result = {}
        for name, site in self.prototype_trace.iter_stochastic_nodes():
            value, log_q = drawn[name]
            value = value if trap is None else value + trap.to(value)
            result[name] = sample_value(site, self.plates, value, log_q)
        return result

    @torch.no_grad()
    def get_posterior(self, *args: Any, **kwargs: Any) -> Any:
        """q over the flat latent vector (D,), its sites in the order of the model: for small D.

        For a state-space prior q is a chain too, a ``GaussianStateSpace`` over (T, S).
        """
        call, _ = self._current(args, kwargs)
        return self.algebra.distribution(call)

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The posterior median (*shape) of every latent site by name; arguments: of the last step."""
        call, _ = self._current(args, kwargs)
        return call.by_site(self.algebra.mean_and_sd(call)[0])

    @torch.no_grad()
    def quantiles(self, quantiles: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior quantiles (Q, *shape) of every latent site by name, at Q levels in (0, 1)."""
        call, _ = self._current(args, kwargs)
        mean, sd = self.algebra.mean_and_sd(call)
        levels = levels_like(quantiles, mean)
        return call.by_site(mean + torch.special.ndtri(levels).unsqueeze(-1) * sd)

    @torch.no_grad()
    def predict(self, *args: Any, **kwargs: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and variance of every entry of every latent site under q, by name, in their shapes.

        Arguments are those of the model, without data: ``guide.predict(X_new)``.  A
        ``GaussianProcess`` follows to new inputs by its conditional, jitter included, without a matrix
        in their number (unless other latent sites depend on the process).  Beside a process, sites of
        another shape with these arguments are left out.

        Raises:
            ValueError: where the prior of another site is not the one of the last step: it is made
                of the arguments, as that of a state-space process at other times.  A guide that was
                unpickled cannot tell before its next step.

        Example: see :class:`~pyro_ngvi.distributions.GaussianProcess`.
        """
        call, others = self._current(args, kwargs, leave_out=True)
        mean, sd = map(call.by_site, self.algebra.mean_and_sd(call))
        return {name: (m, sd[name].square()) for name, m in mean.items() if name not in others}

    # --- data that come, go or change

    def sites(self) -> dict[str, SiteView]:
        """Copies of nu (N, k), Lambda (N, k, k), Lambda^-1 nu (N, k), by a group's first site."""
        return {name: SiteView.of(*pair) for name, pair in self.site_tensors().items()}

    def remove(self, indices: Indices, group: str | None = None) -> None:
        """Delete the sites of these data, which the next call of the model no longer brings.

        q is the one without them from now on: exact with a Gaussian likelihood; otherwise take one or
        two further steps.  A model with a latent variable for each datum is refused at the next call.

        Args:
            indices: numbers of data of the group, or a mask (N,) of bools.  The others close up.
            group: name of the group; not needed where there is one.

        Raises:
            ValueError: for a number that comes twice, a group that is not there, or whose data have
                more than one dimension.
            RuntimeError: where the guide does not know what these data see of the latent block:
                before its first call, after a call with a minibatch, unpickled.
        """
        plan = self._structure()
        found = plan.group(group, table=False)
        index = found.numbers(indices, plan.device)
        self._clear(found, index)
        keep = torch.ones(found.size, dtype=torch.bool, device=index.device)
        keep[index] = False
        self._resize(found, keep.nonzero().squeeze(-1), 0)

    def add(self, count: int, group: str | None = None) -> None:
        """Make room for ``count`` data more, which the next call brings after those of before.

        Their sites are zero, so q stays as it is until the next step.  Groups, and errors of them, as
        in :meth:`remove`.
        """
        plan, before = self._structure(), self._call_before()
        found = plan.group(group, table=False)
        if self.last_step.stale and before is not None and before.whole:
            # now, as the data to come would not fit
            self.refresh(*before.runner.args, **before.runner.kwargs)
        self._resize(found, found.numbers(None, plan.device), count)
        self.algebra.make_room(self._structure())

    def reset(self, indices: Indices | None = None, group: str | None = None) -> None:
        """Set sites back to zero, so that q forgets what these data said: when they have changed.

        Args:
            indices: as in :meth:`remove`; ``None`` for all.
            group: name of the group; ``None`` for the only one or, without indices, for all.
        """
        plan = self._structure()
        if indices is None and group is None:
            for p in self.natural_params().values():
                p.detach().zero_()
            self.algebra.reset()
            self.fresh = True
        else:
            found = plan.group(group)
            self._clear(found, found.numbers(indices, plan.device))
        self.last_step.edited()
        self.curvature = None

    @torch.no_grad()
    def _clear(self, group: Group, index: Tensor) -> None:
        """Zero sites, and the evidence made anew of all others: differences would lose digits."""
        tensors = self.site_tensors()
        if not any(bool(p[index].any()) for p in tensors[group.name]):
            return
        before = self._call_before()
        if before is None or not before.whole:
            raise RuntimeError(
                "AutoSites: the guide does not know what these data see of the latent block, as its "
                "last call had a minibatch, or it is an unpickled copy without one. Call "
                "guide.refresh(*args) with all data before."
            )
        view = self.algebra.view(before)
        for p in tensors[group.name]:
            p[index] = 0.0
        full = {}
        for g in self._structure().groups:
            size, number = before.plan.group(g.name).size, self.last_step.number(g, index.device)
            there = (number >= 0).nonzero().squeeze(-1)
            full[g.name] = tuple(
                p.new_zeros(size, *p.shape[1:]).index_copy(0, number[there], p[there])
                for p in tensors[g.name]
            )
        self.algebra.recollect(view, full)
        self.last_step.stale = False

    def _resize(self, group: Group, kept: Tensor, more: int) -> None:
        """Keep the sites of these numbers, and append ``more`` of 0."""
        number = self.last_step.number(group, kept.device)
        number = torch.cat([number[kept], number.new_full((more,), -1)])
        for p in self.site_tensors()[group.name]:
            # the parameter stays the same object, so Pyro's store and SVI keep it under its name
            p.data, p.grad = torch.cat([p.data[kept], p.data.new_zeros(more, *p.shape[1:])]), None
        self.last_step.plan = self.last_step.plan or self.plan
        self.last_step.numbers[group.name] = number
        self.last_step.edited()
        self.plan, self.curvature = self._structure().resized(group, len(number)), None

    # --- diagnostics

    def loo(self, *args: Any, **kwargs: Any) -> SiteLOO:
        """Leave-one-out predictive densities, log int p(y_n | f_n) q_-n(f_n) df_n in nats, from the
        sites t_n without refitting: q_-n propto q / t_n.

        Arguments: those of the model with all data; by default those of the last step.
        """
        return loo_of(self._snapshot(args, kwargs))

    def influence(
        self,
        *args: Any,
        group: str | None = None,
        groups: Sequence[Indices] | None = None,
        **kwargs: Any,
    ) -> Influence:
        """How far the posterior moves when a datum, or a set of them, is left out, without refitting:
        KL(q_-n || q) in nats, q_-n propto q / t_n.

        Args:
            args: as for :meth:`loo`, with ``kwargs``.
            group: name of the group of the guide; not needed where there is one.
            groups: sets of data to leave out together, each as ``indices`` in :meth:`remove`;
                ``None`` for every datum by itself.  Not where the guide's algebra is not dense.
            kwargs: keyword arguments of the model.
        """
        plan = self._structure()
        chosen = plan.group(group)
        sets = None if groups is None else [chosen.numbers(i, plan.device) for i in groups]
        return influence_of(self._snapshot(args, kwargs), chosen.name, sets)

    def marginals(
        self,
        *args: Any,
        names: Sequence[str] | None = None,
        num_samples: int = 1000,
        seed: int = 0,
        **kwargs: Any,
    ) -> SiteMarginals:
        """Marginal posteriors that are not Gaussian, and the evidence, at the hyperparameters of now.

        After the steps of CVI.  Equations: :mod:`pyro_ngvi.sites.corrections`.

        Args:
            args: as for :meth:`loo`, with ``kwargs``.
            names: latent sites, or predictors ``f = pyro.deterministic("f", ...)``; by default all
                latent sites.
            num_samples: draws to make, by a Gaussian copula with these marginals.
            seed: of the draws.
            kwargs: keyword arguments of the model.

        Raises:
            NotImplementedError: with inducing points, for more than three linear combinations a
                datum, and for some 10^4 latent variables.
        """
        return marginals_of(self._snapshot(args, kwargs), names, num_samples, seed)

    @torch.no_grad()
    def _snapshot(self, args: Any, kwargs: Any) -> Snapshot:
        others, last = self._structure().rest, self.last_step
        if others:
            raise NotImplementedError(
                f"AutoSites: diagnostics of single data are for guides of all latent sites of a model; "
                f"here other guides of the list infer {', '.join(map(repr, others))}."
            )
        if not (args or kwargs) and last.plan is not None:
            raise ValueError(
                "AutoSites: data were added or removed since the last call, and those of now are not "
                "known. Pass them as arguments, or call guide.refresh(*args)."
            )
        call = self._call_of_all(*last.or_given(args, kwargs))
        algebra = shallow_copy(self.algebra)  # a look at other data leaves q alone
        sites = {n: (a.clone(), b.clone()) for n, (a, b) in self.site_tensors().items()}
        return algebra.at(call, sites, algebra.view(call))


def _refuse_gradient(grad: Tensor) -> None:
    """That a gradient is asked for shows an optimizer at work that cannot move the sites."""
    raise RuntimeError(
        "The draws of AutoSites give its sites no gradient, so this loss leaves q at the prior. "
        "Train them by pyro_ngvi.CVI(guide). Pass SVI loss=pyro_ngvi.SitesELBO()."
    )
