"""A linear layer whose weight matrix is made of Walsh-Hadamard blocks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from pyro.nn import PyroModule, PyroSample
from torch import Tensor

from ..guides.reparam import hold_diagonals
from ..linalg.walsh_hadamard_matrix import matrix_for
from ..optim.rule import require
from .local import draws_for_data
from .weights import centred_normal


class WalshHadamardLinear(PyroModule):
    r"""y = x W' + b with W of Walsh-Hadamard blocks: ``nn.Linear`` with a latent g.

    W = sd U(g) of :mod:`pyro_ngvi.linalg.walsh_hadamard_matrix` (Rossi, Marmin & Filippone 2020).  A
    layer D x D has D latent numbers and 2 D in its diagonals, and W is never formed.  With diagonals of
    +-1, as they start, and g_scale 1 the entries of one row of W are a priori independent N(0, sd^2);
    outputs of one block are uncorrelated at one x but not independent.

    ``x`` (..., in_features) goes to (..., out_features).  The latent sites are "g" (num_g,), with prior
    N(0, g_scale^2), and "bias" (out_features,), with prior N(0, 1); replace a prior by setting the
    attribute to another ``PyroSample``.  The diagonals S1 and S2 are parameters ``left`` and ``right``,
    which a natural-gradient optimizer leaves to its ``others``.  With vectorised particles, g
    (S, 1, num_g), it takes (M, in_features) or (S, M, in_features) to (S, M, out_features).

    Start guides at a draw of the prior, ``init_loc_fn=pyro.infer.autoguide.init_to_sample``: at g = 0,
    where most guides start, W is 0, and the layer below gets a gradient from the noise of q alone.
    With ``NGVB`` pass ``averaging=False`` while the diagonals are trained: an average of g over the
    past does not belong to the diagonals of today.

    Not for layers of fewer than some hundred weights, where a mean-field or full-rank guide of a plain
    ``nn.Linear`` fits better and costs little, nor for layers with m far above n: D is at least m.

    Args:
        in_features, out_features: m and n.
        bias: whether there is a b.
        weight_sd: prior sd of each weight while g_scale is 1; by default 1 / sqrt(in_features).
            Behind :class:`RandomFourierFeatures` take 1: the outputs are then draws of its process.
        g_scale: prior sd of each g_k.
        train_diagonals: ``False`` keeps the diagonals at their random signs, as buffers.
        square: for one output, make the m weights of about sqrt(m) numbers, the rows of a square
            matrix; they are no longer independent a priori, and made for every draw.
        device, dtype: as for ``nn.Linear``.

    Raises:
        ValueError: for ``square`` with several outputs, m, n or a ``weight_sd`` out of range; when
            called, for an x whose last dimension is not m.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> from pyro.nn import PyroModule
        >>> from pyro.infer import SVI
        >>> from pyro.infer.autoguide import init_to_sample
        >>> class Net(PyroModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.hidden = ngvi.nn.WalshHadamardLinear(4, 64)
        ...         self.out = ngvi.nn.WalshHadamardLinear(64, 1, square=True)
        ...     def forward(self, x, y=None):
        ...         mean = self.out(self.hidden(x).tanh()).squeeze(-1)
        ...         with pyro.plate("data", len(x)):
        ...             pyro.sample("y", dist.Normal(mean, 0.1), obs=y)
        ...         return mean
        >>> model = Net()
        >>> guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=init_to_sample)
        >>> optim = ngvi.NGVB(guide, averaging=False, others=pyro.optim.Adam({"lr": 0.01}))
        >>> svi = SVI(model, guide, optim, ngvi.BatchedELBO(4))
        >>> x = torch.randn(50, 4)
        >>> loss = svi.step(x, x.sum(-1))
        >>> {name: tuple(value.shape) for name, value in guide.median().items()}
        {'hidden.g': (64,), 'hidden.bias': (64,), 'out.g': (8,), 'out.bias': (1,)}
    """

    g: Any
    bias: Any

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        weight_sd: float | None = None,
        g_scale: float = 1.0,
        train_diagonals: bool = True,
        square: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if square and out_features != 1:
            raise ValueError(
                f"square=True is for a layer of one output, and this has {out_features}."
            )
        require(in_features >= 1, "in_features", "be at least 1", in_features)
        require(out_features >= 1, "out_features", "be at least 1", out_features)
        self.in_features, self.out_features = in_features, out_features
        self.weight_sd = 1.0 / math.sqrt(in_features) if weight_sd is None else float(weight_sd)
        require(self.weight_sd > 0.0, "weight_sd", "be positive", weight_sd)
        self.square, self.has_bias = square, bool(bias)
        shape = (in_features,) if square else (out_features, in_features)
        self.matrix = matrix_for(torch.Size(shape))
        seed = int(torch.randint(2**31, (), device="cpu"))
        signs = self.matrix.signs(seed, torch.empty(0, device=device, dtype=dtype))
        hold_diagonals(self, "", signs, train_diagonals)
        self.g = PyroSample(partial(_prior, shape=(self.matrix.num_g,), sd=float(g_scale)))
        if bias:
            self.bias = PyroSample(partial(_prior, shape=(out_features,)))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features); with particles see the class."""
        check_width(self, x)
        g = draws_for_data(self.g, x)
        if self.square:
            y = (x * self.matrix.dense(g, self.left, self.right)).sum(-1, keepdim=True)
        else:
            y = self.matrix.product(x, g, self.left, self.right)
        y = self.weight_sd * y
        return y + draws_for_data(self.bias, x, needed=False) if self.has_bias else y

    def weight(self, g: Tensor) -> Tensor:
        """W (..., out_features, in_features) for g (..., num_g): to look at; ``forward`` has none."""
        W = self.weight_sd * self.matrix.dense(g, self.left, self.right)
        return W.unsqueeze(-2) if self.square else W


def _prior(layer: Any, shape: tuple[int, ...], sd: float = 1.0) -> Any:
    """For a ``PyroSample`` of a layer, which may move to another device."""
    return centred_normal(layer.left, shape, sd)


def check_width(layer: Any, x: Tensor) -> None:
    """Refuse an input of another width, which may broadcast."""
    if x.shape[-1:] != (layer.in_features,):
        raise ValueError(
            f"{type(layer).__name__} takes an x of shape (..., {layer.in_features}), its in_features, "
            f"and got shape {tuple(x.shape)}."
        )
