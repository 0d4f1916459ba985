r"""An ordinary ``torch.nn.Module`` as a Pyro model.

For a module f with weights w, priors p_j, N examples and a minibatch of M of them,

    log p(y, w)  ~  sum_j log p_j(w_j) + N/M sum_{i in minibatch} log p(y_i | f(x_i; w)).

The factor N/M comes from ``pyro.plate("data", size=N, subsample=...)`` around the M examples that the
caller passes. Of the three idioms that give the same gradients:

* ``plate(size=N, subsample_size=M)`` draws indices that nobody uses, N random numbers a step;
* ``poutine.scale(scale=N / M)`` around a plate of size M hides from every reader of the trace that the
  data are a minibatch: ``to_arviz`` and ``khat`` would judge q by an estimate from M examples;
* ``plate(size=N, subsample=index)``, taken here, draws nothing, follows M from step to step, and
  tells N and M to ``to_arviz``, which then refuses.  The index of a minibatch is -1, not known, unless
  the caller passes one.

The last minibatch of an epoch is smaller and gets a larger scale, N over its own size. That is
unbiased when the loader shuffles, since it is a random subset like the others.

Not for modules whose output for one example depends on the others in the batch, or on random numbers:
see :mod:`pyro_ngvi.nn._refuse`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from ..guides.start import init_to_center
from ..linalg.host import host_bool
from . import _refuse
from ._vectorized import run_vectorized
from .likelihoods import make_likelihood
from .priors import Prior, choose_prior, normal_prior, prior_from

__all__ = ["BayesianModule", "bayesianize"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def bayesianize(
    module: nn.Module,
    likelihood: str | Callable[[Tensor], Any],
    *,
    num_data: int | None = None,
    prior: Prior | Mapping[str, Prior] = 1.0,
    noise: float | Callable[[], Any] | None = None,
) -> BayesianModule:
    r"""A Pyro model ``model(x, y=None)`` in which the parameters of a module are latent.

    Every parameter becomes a sample site with its dotted name, its shape as event shape, and a
    prior. Parameters with ``requires_grad=False`` and buffers keep their values. The module itself
    is copied and left alone.

    The model takes a batch ``x`` (M, ...), or a tuple or list of them for a module of several inputs,
    and ``y`` (M, ...), or ``None`` to draw it; it returns the output of the module. ``y`` is the
    observed site of that name, in a plate "data" of ``num_data`` examples, so that minibatches from a
    ``DataLoader`` go straight into ``svi.step(x, y)``.  :class:`~pyro_ngvi.AutoSites`, with a site for
    every datum, asks for their numbers too: ``svi.step(x, y, index)``.

    Start the guide at the weights of the module, for a guide that starts at the centre of the priors
    starts all hidden units alike: ``AutoMeanFieldNormal(model, init_loc_fn=model.init_to_module)``.

    ``Trace_ELBO`` works with and without vectorised particles, and ``BatchedELBO``; recurrent layers
    (``nn.LSTM`` ...) cannot be batched over weights by torch and need ``Trace_ELBO`` without
    vectorised particles.  So do hyperparameters whose priors depend on other ones (a horseshoe), unless
    by ``BatchedELBO``.

    Args:
        module: maps (M, ...) to (M, ...), example by example.
        likelihood: "categorical" (output: logits (M, ..., K); y: classes (M, ...)), "bernoulli"
            (output: logits; y in {0, 1}), "normal" (output: means), or a function from the output to
            a distribution of ``y`` whose batch shape starts with M. The function is called outside
            the plate and may sample global latents of its own. For "bernoulli" and "normal" an
            output (M, 1) counts as (M,).
        num_data: N, the number of examples that the minibatches come from.
        prior: the sd of a centred normal, or a function ``prior(name, parameter)`` that returns a
            distribution, a scalar one for independent entries; it is called at every run and may
            sample hyperparameters (one that it samples under the same name for several parameters is
            one site, which they share). Or a dict of these by name pattern, the first that matches
            (``{"*.bias": 10.0, "*": 1.0}``).
        noise: for "normal" its sd: a number, or a function that returns the prior of a latent site
            "noise", a scalar one or, with one sd for each output, as one event of their shape. By
            default ``HalfCauchy(1)``.

    Raises:
        TypeError: when ``module`` is no module.
        ValueError: for a missing ``num_data``, a module without parameters to sample or with
            complex ones, a parameter without prior, names that collide, and modules that
            :mod:`pyro_ngvi.nn._refuse` lists. When called: for a minibatch larger than ``num_data``,
            and for shapes that do not fit.

    Example:
        >>> import torch
        >>> from pyro.infer import SVI
        >>> import pyro_ngvi as ngvi
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> model = ngvi.nn.bayesianize(net, "categorical", num_data=100)
        >>> list(model.sites)
        ['0.weight', '0.bias', '2.weight', '2.bias']
        >>> guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=model.init_to_module)
        >>> svi = SVI(model, guide, ngvi.NGVB(guide), loss=ngvi.BatchedELBO(4))
        >>> x, y = torch.randn(20, 2), torch.randint(3, (20,))
        >>> loss = svi.step(x, y)  # 20 of 100 examples: the log-likelihood counts five times
        >>> ngvi.nn.predict(model, guide, x, y, num_samples=50).mean.shape
        torch.Size([20, 3])
    """
    return BayesianModule(module, likelihood, num_data=num_data, prior=prior, noise=noise)


def inputs_of(x: Any, module: nn.Module) -> tuple[Any, ...]:
    """The inputs of ``module`` from what the model takes; a ``DataLoader`` makes a list of a tuple."""
    if isinstance(x, list):
        takes = [p.kind for p in inspect.signature(module.forward).parameters.values()]
        several = sum(kind in _POSITIONAL for kind in takes) > 1
        return tuple(x) if several or inspect.Parameter.VAR_POSITIONAL in takes else (x,)
    return x if isinstance(x, tuple) else (x,)


@contextmanager
def _slow_attention() -> Iterator[None]:
    """Without the kernels of attention layers in eval mode, which have no derivative."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


class BayesianModule(nn.Module):
    """The model that :func:`bayesianize` makes; see there for the arguments.

    It is a module around a copy of yours, ``model.module``: ``.to()``, ``copy`` and ``pickle`` work.
    """

    #: whether two runs of the module gave the same output
    _seen_to_repeat = False

    def __init__(
        self,
        module: nn.Module,
        likelihood: str | Callable[[Tensor], Any],
        *,
        num_data: int | None = None,
        prior: Prior | Mapping[str, Prior] = 1.0,
        noise: float | Callable[[], Any] | None = None,
    ) -> None:
        super().__init__()
        _refuse.refuse_module(module)
        self.num_data = _refuse.checked_num_data(num_data)
        self.likelihood = make_likelihood(likelihood, noise)
        self.module = copy.deepcopy(module)
        named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        reserved = {"y": "the observed site", "data": "the plate of the data"}
        reserved |= {site: "a site of the likelihood" for site in self.likelihood.sites}
        _refuse.refuse_names(named, reserved)
        self._priors = {name: choose_prior(prior, name) for name in named}
        self._dims = {name: p.dim() for name, p in named.items()}
        self._watched = _refuse.to_watch(self.module)
        self._sites = self._make_sites()

    @property
    def sites(self) -> dict[str, torch.Size]:
        """The sampled parameters: name and shape."""
        return {name: self.module.get_parameter(name).shape for name in self._dims}

    def forward(self, x: Any, y: Tensor | None = None, index: Tensor | None = None) -> Tensor:
        """Sample the weights, and ``y`` unless it is given; the output of the module.

        The output is (M, ...), with vectorised particles (S, M, ...).  ``index`` (M,) holds the numbers
        of the examples among all ``num_data``, which :class:`~pyro_ngvi.AutoSites` asks for.
        """
        output, fn = self._run(x)
        num = fn.batch_shape[-1]
        if y is not None:
            y = self.observed(fn, y)
            if num > self.num_data:
                raise ValueError(
                    f"The minibatch has {num} examples, but num_data is {self.num_data}: it must be "
                    f"the size of the whole training set, len(dataset)."
                )
        with pyro.plate(
            "data", max(self.num_data, num), subsample=self._numbers(index, num, output)
        ):
            pyro.sample("y", fn, obs=y)
        return output

    def _numbers(self, index: Any, num: int, output: Tensor) -> Tensor:
        """The numbers (num,) of the examples; -1, not known, for those of a minibatch without any."""
        if index is None:  # nobody but AutoSites asks
            all_here = torch.arange(num, device=output.device)
            return all_here if num >= self.num_data else torch.full_like(all_here, -1)
        index = torch.as_tensor(index, device=output.device)
        within = host_bool(((index >= 0) & (index < self.num_data)).all())
        if index.shape != (num,) or index.is_floating_point() or within is False:
            raise ValueError(
                f"index is of shape {tuple(index.shape)} and dtype {index.dtype}; it must hold the "
                f"number, from 0 to {self.num_data - 1}, of each of the {num} examples."
            )
        return index

    def distribution(self, x: Any) -> Any:
        """Sample the weights; the distribution of ``y`` given them and ``x``, batch shape (M,)."""
        return self._run(x)[1]

    def observed(self, fn: Any, y: Tensor) -> Tensor:
        """``y`` in the shape and dtype that ``fn = distribution(x)`` takes.

        Raises:
            ValueError: when the shape of ``y`` is another.
        """
        shape = fn.batch_shape[-1:] + fn.event_shape
        parameter, _ = next(iter(self._sites.values()))
        y = self.likelihood.cast(y, parameter.dtype, shape)
        if y.shape != shape:
            raise ValueError(
                f"y has shape {tuple(y.shape)}, but at this x the likelihood ({self.likelihood}) is "
                f"one of y with shape {tuple(shape)}. Reshape y, or the output of the module."
            )
        return y

    def init_to_module(self, site: Any = None) -> Any:
        """For ``init_loc_fn`` of a guide: start at the module's own weights.

        Latent sites that are no weights start as in :func:`~pyro_ngvi.guides.init_to_center`.
        """
        if site is None:
            return self.init_to_module
        if site["name"] not in self._dims:
            return init_to_center(site)
        return self.module.get_parameter(site["name"]).detach().clone()

    def _run(self, x: Any) -> tuple[Tensor, Any]:
        """The output (*lead, M, ...) of the module and the distribution of y, batch (*lead, M)."""
        for path, part in self._watched:
            _refuse.refuse_mode(path, part)
        inputs = inputs_of(x, self.module)
        weights = self._sample_weights()
        # Vectorised particles put dimensions in front of those of a weight; nothing else does.
        single = all(
            w.dim() == n for w, n in zip(weights.values(), self._dims.values(), strict=True)
        )
        with _slow_attention():
            if single:
                output, lead = self._run_module(weights, inputs), 0
            else:
                output, lead = run_vectorized(self.module, weights, self._dims, inputs)
        num = len(inputs[0])
        if not isinstance(output, Tensor) or output.dim() <= lead or output.shape[lead] != num:
            given = isinstance(output, Tensor)
            what = f"shape {tuple(output.shape)}" if given else f"type {type(output).__name__}"
            raise ValueError(
                f"The module returns an output of {what} for a batch of {num} examples; it must "
                f"return one tensor whose first dimension is the batch (for recurrent layers "
                f"batch_first=True, in a module that returns the output alone)."
            )
        fn = self.likelihood(output, lead)
        if fn.batch_shape[-1:] != (num,):
            raise ValueError(
                f"The likelihood ({self.likelihood}) makes of an output of shape "
                f"{tuple(output.shape)} a distribution of batch shape {tuple(fn.batch_shape)}; that "
                f"must be the number of examples, ({num},)."
            )
        return output, fn

    def _run_module(self, weights: dict[str, Tensor], inputs: tuple[Any, ...]) -> Any:
        output = torch.func.functional_call(self.module, weights, inputs)
        if not self._seen_to_repeat:
            with torch.no_grad():  # at its own weights: at zero, where a guide starts, all is alike
                _refuse.refuse_change(self.module(*inputs), self.module(*inputs))
            self._seen_to_repeat = True
        return output

    def _sample_weights(self) -> dict[str, Tensor]:
        weights, hyperparameters = {}, {}
        for name, (parameter, prior) in self._sites.items():
            if prior is None:
                prior = prior_from(self._priors[name], name, parameter, hyperparameters)
            weights[name] = pyro.sample(name, prior)
        return weights

    def _make_sites(self) -> dict[str, tuple[Tensor, Any]]:
        """By name the parameter and its prior; None for one that a function makes at each run.

        Not made at the first run, which may be under ``torch.func`` transforms or inference mode,
        where tensors are not ones to keep.
        """
        made = {}
        for name, rule in self._priors.items():
            parameter = self.module.get_parameter(name)
            made[name] = (parameter, None if callable(rule) else normal_prior(rule, parameter))
        return made

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        super()._apply(fn, *args, **kwargs)
        self._sites = self._make_sites()  # .to() changes device or dtype
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sites": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._sites = self._make_sites()
