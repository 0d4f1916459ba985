"""BatchedELBO beside Trace_ELBO on the same noise, and the models that several tests use."""

from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch import Tensor
from torch.distributions import constraints
from torch.overrides import TorchFunctionMode

from pyro_ngvi.losses import BatchedELBO

N, D = 7, 3


class RecordNoise(TorchFunctionMode):
    """The shapes of the tensors that are filled with normal noise, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.normal_:
            self.shapes.append(args[0].shape)
        return func(*args, **(kwargs or {}))


class FixedNoise(TorchFunctionMode):
    """Fills with the given noise: tables[j][s] at the j-th draw of particle s."""

    def __init__(self, tables: list[Tensor]) -> None:
        super().__init__()
        self.tables = tables
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.normal_:
            particle, draw = divmod(self.count, len(self.tables))
            self.count += 1
            return args[0].copy_(self.tables[draw][particle])
        return func(*args, **(kwargs or {}))


def gradients(elbo: Any, model: Any, guide: Any, args: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradient of every parameter that SVI would see."""
    with poutine.trace(param_only=True) as capture:
        loss = elbo.loss_and_grads(model, guide, *args)
    result = {}
    nodes: dict[str, Any] = dict(capture.trace.nodes)
    for name, site in nodes.items():
        param = site["value"].unconstrained()
        if param.grad is not None:  # a flow has a parameter that only tells its dtype
            result[name] = param.grad.clone()
            param.grad = None
    return torch.as_tensor(loss), result


def assert_same_as_trace_elbo(
    model: Any, guide: Any, args: Any, num_particles: int, reference: Any = None
) -> None:
    """Compare with Trace_ELBO on the same noise; ``reference`` is its (model, guide) if other."""
    guide(*args)  # the guide's prototype draws from the prior
    with RecordNoise() as record, poutine.block():
        guide(*args)
    torch.manual_seed(1)
    loss, grads = gradients(BatchedELBO(num_particles), model, guide, args)
    torch.manual_seed(1)
    ref_model, ref_guide = (model, guide) if reference is None else reference()
    tables = [torch.randn(num_particles, *shape, dtype=loss.dtype) for shape in record.shapes]
    with FixedNoise(tables) as noise:
        ref_loss, ref_grads = gradients(Trace_ELBO(num_particles), ref_model, ref_guide, args)
    assert noise.count == num_particles * len(tables)
    tolerance = 1e-10 if loss.dtype == torch.float64 else 2e-5
    ref_loss = ref_loss.to(loss.dtype)
    torch.testing.assert_close(loss, ref_loss, rtol=tolerance, atol=tolerance)
    assert grads.keys() == ref_grads.keys()
    for name in grads:
        scale = 1 + ref_grads[name].abs().max().item()
        torch.testing.assert_close(
            grads[name], ref_grads[name], rtol=tolerance, atol=tolerance * scale
        )


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(N, D, generator=generator, dtype=dtype)
    return X, (X.sum(-1) > 0).to(dtype)


def logistic(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def nested_plates(X: Tensor, y: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(X.new_zeros(()), 1.0))
    columns = pyro.plate("columns", D, dim=-1)
    rows = pyro.plate("rows", N, dim=-2)
    with columns:
        b = pyro.sample("b", dist.Normal(a, X.new_ones(D)))
    with rows:
        c = pyro.sample("c", dist.Normal(X.new_zeros(N, 1), 1.0))
    with rows, columns:
        pyro.sample("x", dist.Normal(b + c, 1.0), obs=X)


def param_model(X: Tensor, y: Tensor) -> None:
    bias = pyro.param("bias", lambda: X.new_tensor(0.5))
    noise = pyro.param("noise", X.new_tensor(0.7), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(X @ w + bias, noise), obs=y)


def hand_written_guide(X: Tensor, y: Tensor) -> None:
    loc = pyro.param("loc", torch.linspace(-1.0, 1.0, D))
    scale = pyro.param("scale", torch.full((D,), 0.3), constraint=constraints.positive)
    shift = pyro.sample("shift", dist.Normal(0.0, 0.5), infer={"is_auxiliary": True})
    pyro.sample("w", dist.Normal(loc + shift, scale).to_event(1))


@dataclass
class Local:
    """Local and global latents under a subsampled plate; ``subsample`` fixes the minibatch."""

    subsample: Tensor | None = None
    seen: list[Tensor] = field(default_factory=list)

    def plate(self, *args: Any) -> Any:
        size = 3 if self.subsample is None else None
        return pyro.plate("data", N, subsample_size=size, subsample=self.subsample)

    def __call__(self, X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(D), 1.0).to_event(1))
        with self.plate() as index:
            self.seen.append(index)
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(X[index] @ w + z, 1.0), obs=y[index])


GUIDES = {
    "full rank": lambda model: AutoMultivariateNormal(model, init_scale=0.3),
    "mean field": lambda model: AutoDiagonalNormal(model, init_scale=0.3),
    "low rank": lambda model: AutoLowRankMultivariateNormal(model, init_scale=0.3, rank=1),
    "site by site": lambda model: AutoNormal(model, init_scale=0.3),
}
