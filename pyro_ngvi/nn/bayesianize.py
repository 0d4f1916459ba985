r"""An ordinary ``torch.nn.Module`` as a Pyro model.

For a module f with weights w, priors p_j, N examples and a minibatch of M of them,

    log p(y, w)  ~  sum_j log p_j(w_j) + N/M sum_{i in minibatch} log p(y_i | f(x_i; w)).

The factor N/M comes from ``pyro.plate("data", size=N, subsample=index)`` around the M examples that the
caller passes, with an index of -1, not known, unless the caller passes one.  So the plate draws nothing
and tells N and M to ``to_arviz`` and ``khat``, which then refuse.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from ..guides.centers import init_to_center
from ..linalg.host import host_bool
from ..optim.rule import require
from .weights import (
    REFUSED,
    Prior,
    broadcasts_to,
    choose_prior,
    over_rows,
    prior_from,
    refuse,
    refuse_change,
    refuse_other_than_pyro,
    run_vectorized,
    sd_or_function,
)

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


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
    r"""A Pyro model ``model(x, y=None)`` in which the parameters of a module are latent.

    Every parameter becomes a sample site with its dotted name, its shape as event shape, and a
    prior. Parameters with ``requires_grad=False`` and buffers keep their values. The module itself
    is copied and left alone; the copy is ``model.module``.

    The model takes a batch ``x`` (M, ...), or a tuple or list of them for a module of several inputs,
    and ``y`` (M, ...), or ``None`` to draw it; it returns the output of the module. ``y`` is the
    observed site of that name, in a plate "data" of ``num_data`` examples.
    :class:`~pyro_ngvi.AutoSites` asks for the numbers of the examples too: ``svi.step(x, y, index)``.

    A guide that starts at the centre of the priors starts all hidden units alike; start it at the
    weights of the module, by ``init_loc_fn=model.init_to_module``.

    Vectorised particles of Pyro run neither recurrent layers, which ``BatchedELBO`` runs one by one,
    nor prior functions that sample hyperparameters.  Not for modules whose output for one example
    depends on the others in the batch, or on random numbers (:mod:`pyro_ngvi.nn.weights`).

    Args:
        module: maps (M, ...) to (M, ...), example by example.
        likelihood: "categorical" (output: logits (M, ..., K); y: classes (M, ...)), "bernoulli"
            (output: logits; y in {0, 1}), "normal" (output: means), or a function from the output to
            a distribution of ``y`` whose batch shape starts with M. The function is called outside
            the plate and may sample global latents of its own. For "bernoulli" and "normal" an
            output (M, 1) counts as (M,).
        num_data: N, the number of examples that the minibatches come from: ``len(dataset)``.
        prior: the sd of a centred normal, or a function ``prior(name, parameter)`` that returns a
            distribution, a scalar one for independent entries, and may sample hyperparameters (those
            of one name are one site). Or a dict of these by name pattern, the first that matches
            (``{"*.bias": 10.0, "*": 1.0}``).
        noise: for "normal" its sd: a number, or a function that returns the prior of a latent site
            "noise", a scalar one or, with one sd for each output, as one event of their shape. By
            default ``HalfCauchy(1)``.

    Raises:
        ValueError: for modules that :mod:`pyro_ngvi.nn.weights` lists or without parameters to sample,
            a parameter without prior, arguments out of range, a ``noise`` of another likelihood; when
            called, for shapes, numbers of examples or a ``num_data`` that do not fit.
        TypeError: when called, for a likelihood, prior or noise that is no distribution of Pyro.

    Example:
        >>> import torch, pyro_ngvi as ngvi
        >>> from pyro.infer import SVI
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> model = ngvi.nn.bayesianize(net, "categorical", num_data=100)
        >>> list(model.sites)
        ['0.weight', '0.bias', '2.weight', '2.bias']
        >>> guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=model.init_to_module)
        >>> svi = SVI(model, guide, ngvi.NGVB(guide), loss=ngvi.BatchedELBO(4))
        >>> x, y = torch.randn(20, 2), torch.randint(3, (20,))
        >>> loss = svi.step(x, y)  # 20 of 100 examples: the log-likelihood counts five times
    """

    #: whether two runs of the module gave the same output
    _seen_to_repeat = False

    def __init__(
        self,
        module: nn.Module,
        likelihood: str | Callable[[Tensor], Any],
        num_data: int,
        prior: Prior | Mapping[str, Prior] = 1.0,
        noise: float | Callable[[], Any] | None = None,
    ) -> None:
        super().__init__()
        refuse(module.named_modules())
        if not callable(likelihood) and likelihood not in ("categorical", "bernoulli", "normal"):
            raise ValueError(
                f'likelihood is {likelihood!r}; it must be "categorical", "bernoulli", "normal" or a '
                f"function from the output of the module to a distribution."
            )
        if noise is not None:
            if likelihood != "normal":
                raise ValueError(
                    f'noise belongs to likelihood="normal"; here it is {likelihood!r}.'
                )
            noise = sd_or_function(noise, "noise", "lambda: dist.HalfNormal(1.0)")
        whole = isinstance(num_data, Integral) and not isinstance(num_data, bool) and num_data >= 1
        require(whole, "num_data", "be the number of training examples, len(dataset)", num_data)
        self.num_data, self.likelihood, self.noise = int(num_data), likelihood, noise
        self._called = getattr(likelihood, "__name__", str(likelihood))
        self.module = copy.deepcopy(module)
        named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not named:
            raise ValueError(
                f"{type(module).__name__} has no parameter to sample: none requires a gradient."
            )
        self._priors = {name: choose_prior(prior, name) for name in named}
        kinds = tuple(kind for kinds, _, _ in REFUSED for kind in kinds)
        # train() and eval() may change what they do
        self._watched = [m for m in self.module.named_modules() if isinstance(m[1], kinds)]

    @property
    def sites(self) -> dict[str, torch.Size]:
        """The sampled parameters: name and shape, which is the event shape of the site."""
        return {name: self.module.get_parameter(name).shape for name in self._priors}

    def forward(self, x: Any, y: Tensor | None = None, index: Tensor | None = None) -> Tensor:
        """Sample the weights, and ``y`` unless it is given; the module's output (M, ...).

        With vectorised particles it is (S, M, ...).  ``index`` (M,): the examples' numbers among all.
        """
        output, fn = self._run(x)
        num = fn.batch_shape[-1]
        if y is not None:
            y = self.observed(fn, y)
            if num > self.num_data:
                raise ValueError(
                    f"The minibatch has {num} examples, but num_data is {self.num_data}: it must "
                    "be that of the whole training set, len(dataset)."
                )
        if index is None:  # nobody but AutoSites asks
            index = torch.arange(num, device=output.device)
            index = index if num >= self.num_data else torch.full_like(index, -1)
        else:
            index = torch.as_tensor(index, device=output.device)
            within = host_bool(((index >= 0) & (index < self.num_data)).all())
            whole = not index.is_floating_point() and index.dtype is not torch.bool
            if index.shape != (num,) or not whole or within is False:
                raise ValueError(
                    f"index is of shape {tuple(index.shape)} and dtype {index.dtype}; it must hold "
                    f"the number, from 0 to {self.num_data - 1}, of each of the {num} examples."
                )
        with pyro.plate("data", max(self.num_data, num), subsample=index):
            pyro.sample("y", fn, obs=y)
        return output

    def distribution(self, x: Any) -> Any:
        """Sample the weights; the distribution of ``y`` given them and ``x``, batch shape (M,)."""
        return self._run(x)[1]

    def observed(self, fn: Any, y: Tensor) -> Tensor:
        """``y`` in the shape and dtype that ``fn = distribution(x)`` takes.

        Raises:
            ValueError: when the shape of ``y`` is another.
        """
        shape = fn.batch_shape[-1:] + fn.event_shape
        if not callable(self.likelihood):
            y = y.squeeze(-1) if y.shape == (*shape, 1) else y
            if self.likelihood != "categorical":
                y = y.to(self.module.get_parameter(next(iter(self._priors))).dtype)
        if y.shape != shape:
            raise ValueError(
                f"y has shape {tuple(y.shape)}, but at this x the likelihood {self._called!r} is "
                f"one of y with shape {tuple(shape)}. Reshape y, or the output of the module."
            )
        return y

    def init_to_module(self, site: Any = None) -> Any:
        """For ``init_loc_fn`` of a guide: start at the module's own weights.

        Latent sites that are no weights start as in :func:`~pyro_ngvi.guides.init_to_center`.
        """
        if site is None:
            return self.init_to_module
        if site["name"] not in self._priors:
            return init_to_center(site)
        return self.module.get_parameter(site["name"]).detach().clone()

    def _run(self, x: Any) -> tuple[Tensor, Any]:
        """The output (*lead, M, ...) of the module and the distribution of y, batch (*lead, M)."""
        if self._watched:
            refuse(self._watched)
        inputs = inputs_of(x, self.module)
        weights: dict[str, Tensor] = {}
        hyperparameters: dict[str, Tensor] = {}
        for name, rule in self._priors.items():
            parameter = self.module.get_parameter(name)
            weights[name] = pyro.sample(name, prior_from(rule, name, parameter, hyperparameters))
        with _slow_attention():
            output, lead = run_vectorized(self.module, weights, inputs)
            if not self._seen_to_repeat and not lead:
                # at its own weights: at zero, where a guide starts, all is alike
                with torch.no_grad():
                    refuse_change(self.module(*inputs), self.module(*inputs))
                self._seen_to_repeat = True
        num = len(inputs[0])
        if not isinstance(output, Tensor) or output.dim() <= lead or output.shape[lead] != num:
            given = isinstance(output, Tensor)
            what = f"shape {tuple(output.shape)}" if given else f"type {type(output).__name__}"
            raise ValueError(
                f"The module returns an output of {what} for a batch of {num} examples; it must "
                "return one tensor whose first dimension is the batch (recurrent layers: "
                "batch_first=True)."
            )
        fn = self._likelihood(output, lead)
        if fn.batch_shape[-1:] != (num,):
            raise ValueError(
                f"The likelihood {self._called!r} makes of an output of shape "
                f"{tuple(output.shape)} a distribution of batch shape {tuple(fn.batch_shape)}; "
                f"that must be the number of examples, ({num},)."
            )
        return output, fn

    def _likelihood(self, output: Tensor, lead: int) -> Any:
        """The distribution of y, of batch shape (*lead, M): what follows the examples is one event."""
        if callable(self.likelihood):
            fn: Any = self.likelihood(output)
            refuse_other_than_pyro(f"The likelihood {self._called!r}", fn)
            return fn.to_event(max(0, len(fn.batch_shape) - lead - 1))
        if self.likelihood == "categorical":
            return dist.Categorical(logits=output).to_event(max(0, output.dim() - lead - 2))
        if output.dim() - lead > 1:  # (M, 1) as (M,), against which y would be broadcast to (M, M)
            output = output.squeeze(-1)
        if self.likelihood == "bernoulli":
            fn = dist.Bernoulli(logits=output)
        else:
            fn = dist.Normal(output, self._sd(output, lead))
        return fn.to_event(output.dim() - lead - 1)

    def _sd(self, mean: Tensor, lead: int) -> Any:
        """The sd of "normal": a number, or the latent site "noise" as (*lead, 1, ...)."""
        if isinstance(self.noise, float):
            return self.noise
        prior: Any = self.noise() if callable(self.noise) else dist.HalfCauchy(mean.new_ones(()))
        refuse_other_than_pyro("The function noise", prior)
        sd = pyro.sample("noise", prior)
        batch, event, outputs = prior.batch_shape, prior.event_shape, mean.shape[lead + 1 :]
        one = lead > 0 or batch.numel() == 1  # in front are vectorised particles alone
        fits = not event or (len(event) == len(outputs) and broadcasts_to(event, outputs))
        if not one or not fits:
            raise ValueError(
                f"The prior of the noise has batch shape {tuple(batch)} and event shape "
                f"{tuple(event)}, an example outputs of shape {tuple(outputs)}. Return a scalar "
                "prior, or one event: dist.HalfCauchy(torch.ones(3)).to_event(1) for (3,)."
            )
        sd = over_rows(sd, len(event))
        split = sd.dim() - len(event)
        return sd.reshape(sd.shape[:split] + (1,) * (len(outputs) - len(event)) + sd.shape[split:])


bayesianize = BayesianModule
