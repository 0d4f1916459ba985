r"""Squared gradients of single data in a network's weights, from the backward pass that is run anyway.

For a latent site W that a model uses as the weight or bias of F.linear, a convolution, an embedding, a
normalisation, a matrix product, a sum or a product by entries,

    H_W = 1/S sum_s sum_i scale_i mask_i g_si^2,     g_si = d log p(y_i | z_s) / dW,

the diagonal of VOGN (Khan et al. 2018, arXiv:1806.04854), follows from the inputs of the layer and the
gradients of its outputs (:mod:`pyro_ngvi.curvature.taps.layers`), at the cost of about one more matrix
product a layer.  While the model runs, a ``TorchFunctionMode`` sees the layers and puts a tap behind
each: the identity, whose backward reduces what comes by, at once.  In the backward pass of the loss
-1/S sum_s (sum_i scale log p(y_i | z_s) + ...) that is -scale/S times the gradient.

Memory: for one layer at a time the squares of its input and of its output gradient, and ``budget``
bytes where gradients of single data have to be formed: of weights used at several places or times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from ...runtime.density import Site, Sites, sum_log_prob
from .layers import LAYERS, Call, Layer, row_blocks

_VIEWS = """t transpose swapaxes permute movedim reshape flatten unflatten squeeze unsqueeze
            select narrow split chunk unbind tensor_split""".split()
_GETTERS: Any = Tensor.T, Tensor.mT
#: calls that only rearrange the entries of their first argument
VIEWS = {getattr(owner, name) for owner in (torch, Tensor) for name in _VIEWS}
VIEWS |= {Tensor.view, Tensor.__getitem__, *(getter.__get__ for getter in _GETTERS)}


def place(x: Tensor) -> tuple[Any, ...]:
    """Where the entries of ``x``, a view, lie in the flat value (numel,) of its site."""
    return tuple(x.shape), tuple(x.stride()), int(x.storage_offset())


def part(flat: Tensor, where: tuple[Any, ...]) -> Tensor:
    """That part of ``flat`` (numel,), or of each row of it, contiguous, as a view."""
    (size, stride, offset), rows = where, flat.shape[:-1]
    return flat.as_strided((*rows, *size), (*flat.stride()[:-1], *stride), offset)


class Use(NamedTuple):
    """One use of a site's value in a layer, whose output has so many dimensions."""

    site: str
    layer: Layer
    place: tuple[Any, ...]
    out_dim: int


Member = tuple[Use, Tensor | None, Tensor]  # with the layer's input, and its output's gradient


def _is_plain(x: Any) -> bool:
    """Whether an argument is made of numbers and slices only."""
    if isinstance(x, list | tuple):
        return all(map(_is_plain, x))
    return x is None or x is Ellipsis or isinstance(x, int | slice)


class Run(TorchFunctionMode):
    """One run of the model, with taps behind layers of latent weights; to ``check``, all ``seen``."""

    def __init__(self, taps: LayerTaps, check: bool = False) -> None:
        super().__init__()
        self.taps, self.check = taps, check
        # latent values and views of them by id; the strides of a meta tensor say which entries they are
        self.weights: dict[int, tuple[Tensor, str, Tensor]] = {}
        self.uses: list[Use] = []
        self.seen: list[tuple[Tensor | None, Tensor]] = []
        self.observed: dict[str, Site] = {}
        self.as_checked = False
        self.waiting: dict[str, list[Member]] = {}  # uses of a site that are squared together

    def __contains__(self, x: object) -> bool:
        return id(x) in self.weights

    def of(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _SiteWatch(self), self:
            result = program(*args, **kwargs)
        self.weights = {}
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        find = LAYERS.get(func)
        if find is not None:
            calls = list(find(self, *args, **kwargs))
            if calls:
                return self._tap(out, calls)
        if func in VIEWS and args and args[0] in self:
            self._follow(func, args, kwargs, out)
        return out

    def _tap(self, out: Tensor, calls: list[Call]) -> Tensor:
        uses, reads = [], []
        for weight, layer, x in calls:
            _, site, twin = self.weights[id(weight)]
            uses.append(Use(site, layer, place(twin), out.dim()))
            reads.append(x is not None)
        self.uses += uses
        if self.check:
            self.seen += [(x, out) for _, _, x in calls]
            return out.clone()
        arrived = partial(self.taps.arrived, self, list(zip(uses, reads, strict=True)))
        inputs = [x.detach() for _, _, x in calls if x is not None]
        return _Tap.apply(out, arrived, False, *inputs)  # pyright: ignore[reportReturnType]

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add the result ``out`` of a call that rearranges the entries of its first argument."""
        if not _is_plain((args[1:], tuple(kwargs.values()))):
            return
        _, site, twin = self.weights[id(args[0])]
        twins = func(twin, *args[1:], **kwargs)
        if isinstance(out, Tensor):
            out, twins = (out,), (twins,)
        for view, its_twin in zip(out, twins, strict=True):
            if its_twin is twin or its_twin._is_view():  # the strides of a copy say nothing
                self.weights[id(view)] = view, site, its_twin


class _SiteWatch(Messenger):
    """Tells a run which tensors are latent values, and what is observed."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def _pyro_post_sample(self, msg: Site) -> None:
        run, name, value = self._run, msg["name"], msg["value"]
        twin = run.taps.twins.get(name)
        if msg["is_observed"]:
            run.observed[name] = msg
        elif twin is not None and isinstance(value, Tensor) and value.shape == twin.shape:
            run.weights[id(value)] = value, name, twin


class _Tap(Function):
    """The identity; its backward hands the inputs and the gradient of ``out`` to ``arrived``."""

    @staticmethod
    def forward(out: Tensor, arrived: Any, batched: bool, *xs: Tensor) -> Tensor:
        return out.clone()  # not a view, which the model could not change in place

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.arrived, ctx.batched, *xs = inputs
        ctx.save_for_backward(*xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,), xs = grads, ctx.saved_tensors
        if ctx.batched:
            ctx.arrived(xs, g)
        else:
            ctx.arrived(tuple(x[None] for x in xs), g[None])
        return g, None, None, *(None for _ in xs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, out: Tensor, arrived: Any, _: bool, *xs: Tensor) -> Any:
        moved = [
            x[None] if dim is None else x.movedim(dim, 0)
            for x, dim in zip(xs, in_dims[3:], strict=True)
        ]
        return _Tap.apply(out.movedim(in_dims[0], 0), arrived, True, *moved), 0


class LayerTaps:
    """A model with taps behind the layers whose weights are latent sites; call it like the model.

    :func:`~pyro_ngvi.curvature.taps.check.check_taps` fills in what it covers.  At each later step run
    it under ``run_particles``, call ``backward``, and take :meth:`squared_gradients`.

    Attributes:
        sites: the latent sites that are covered.
        undecided: whether some latent had no gradient when it was checked, so that nothing was seen.
        observed: the site whose log_prob numbers the data; ``data_dims``: its dimensions.
        expected: the uses and observed sites of the checked run.
        tied: by site, the number of its uses, where some share entries of its value.
    """

    def __init__(
        self, model: Callable[..., Any], values: Mapping[str, Tensor], budget: int = 2**26
    ) -> None:
        self.model, self.budget = model, budget
        self.twins = {k: torch.empty(v.shape[1:], device="meta") for k, v in values.items()}
        self.like = {k: v.new_empty(0) for k, v in values.items()}
        self.sites: tuple[str, ...] = ()
        self.undecided = False
        self.observed, self.data_dims = "", 0
        self.expected: tuple[list[Use], list[str]] = [], []
        self.tied: dict[str, int] = {}
        self.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self.sites:
            return self.model(*args, **kwargs)
        run = Run(self)
        self.runs.append(run)
        result = run.of(self.model, *args, **kwargs)
        run.as_checked = (run.uses, list(run.observed)) == self.expected
        return result

    def log_probs(self, sites: Sites) -> tuple[Tensor, Tensor]:
        """The log probability of the site that is observed, and of all others."""
        rest = dict(sites)
        data = {self.observed: rest.pop(self.observed)}
        return sum_log_prob(data), sum_log_prob(rest)

    def clear(self) -> None:
        """Forget what an earlier run left, such as one that an error broke off."""
        self.runs: list[Run] = []
        self._totals: dict[str, Tensor] = {}

    def factor(self, num_particles: int) -> float:
        """S / scale; 0 where a run called other layers, or the data share no scale."""
        if not self.runs or not self.runs[-1].as_checked:
            return 0.0
        scale = self.runs[-1].observed[self.observed]["scale"]
        return num_particles / scale if isinstance(scale, int | float) and scale > 0 else 0.0

    def squared_gradients(self, num_particles: int) -> dict[str, Tensor]:
        """H_W by site, as far as it is known, after a backward pass of an average over S particles."""
        factor, result = self.factor(num_particles), {}
        for name in self.sites if factor else ():
            for run in self.runs:  # where the loss does not depend on one of several uses
                if name in run.waiting:
                    self._square_together(run.waiting.pop(name))
            shape, total = self.twins[name].shape, self._totals.get(name)
            result[name] = (
                self.like[name].new_zeros(shape)
                if total is None
                else total.mul_(factor).view(shape)
            )
        self.clear()
        return result

    def arrived(self, run: Run, uses: list[tuple[Use, bool]], xs: Any, g: Tensor) -> None:
        """Reduce the output gradients g (S, ...) of a layer, whose inputs are xs (S or 1, ...)."""
        if run.as_checked:
            inputs = iter(xs)
            for use, reads in uses:
                self.take(run, use, *self.rows(use, next(inputs) if reads else None, g))

    def rows(self, use: Use, x: Tensor | None, g: Tensor) -> tuple[Tensor | None, Tensor]:
        """x (S or 1, n, ...) and g (S, n, ...), one row a datum, in the dtype of the sites."""
        dtype = self.like[use.site].dtype  # autocast may have others
        if x is not None:
            x = (x.to(dtype) if x.is_floating_point() else x).flatten(1, self.data_dims)
        return x, g.detach().to(dtype).flatten(1, self.data_dims)

    def take(self, run: Run, use: Use, x: Tensor | None, g: Tensor) -> None:
        """Square what has come to a use, where it is tied when the last of its kind has come."""
        if use.site not in self.tied:
            self._add(use.site, use.place, use.layer.squares(x, g, self.budget))
            return
        members = run.waiting.setdefault(use.site, [])
        members.append((use, x, g))
        if len(members) == self.tied[use.site]:
            self._square_together(run.waiting.pop(use.site))

    def _square_together(self, members: list[Member]) -> None:
        """Several uses of one site's value: the sum of their gradients is squared."""
        twin = self.twins[members[0][0].site]
        pairs = [(x, g) for _, x, g in members]
        size = 2 * twin.numel() + max(use.layer.row_size(g) for use, _, g in members)
        squares = []
        for block in row_blocks(pairs, self.budget // (pairs[0][1].element_size() * size)):
            gradient = block[0][1].new_zeros(len(block[0][1]), twin.numel())
            for (use, _, _), (x, g) in zip(members, block, strict=True):
                part(gradient, use.place).add_(use.layer.rows(x, g))
            squares.append(gradient.square_().sum(0))
        total = reduce(torch.add, squares).view(twin.shape)
        self._add(members[0][0].site, place(twin), total)

    def _add(self, site: str, where: tuple[Any, ...], squares: Tensor) -> None:
        twin, total = self.twins[site], self._totals.get(site)
        if total is None and where == place(twin):
            self._totals[site] = squares.reshape(-1)
            return
        if total is None:
            total = self._totals[site] = squares.new_zeros(twin.numel())
        part(total, where).add_(squares)
