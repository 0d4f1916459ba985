"""Models with layers of latent weights, and their squared per-example gradients in two ways."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from pyro_ngvi.curvature.taps.check import check_taps
from pyro_ngvi.curvature.taps.taps import LayerTaps
from pyro_ngvi.runtime.density import site_kind, site_log_prob
from pyro_ngvi.runtime.model_density import batched_trace
from pyro_ngvi.runtime.run import Minibatches, run_particles

Values = dict[str, Tensor]
N = 5


def latent(name: str, *shape: int) -> Tensor:
    return pyro.sample(name, dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))


def observe(mean: Tensor) -> None:
    """One example a row of ``mean`` (n, ...)."""
    y = torch.linspace(-1, 1, mean.numel()).view(mean.shape)
    with pyro.plate("data", len(mean)):
        pyro.sample("y", dist.Normal(mean, 0.7).to_event(mean.dim() - 1), obs=y)


def inputs(*shape: int) -> Tensor:
    """The same numbers in each run and for each particle."""
    return (1.7 * torch.arange(torch.Size(shape).numel()).sqrt() * 3).sin().view(shape)


def draw(model: Any, S: int, *args: Any) -> Values:
    """Values (S, ...) of the latent sites."""
    trace = pyro.poutine.trace(model).get_trace(*args)
    sites = trace.iter_stochastic_nodes()
    shapes = {name: site["value"].shape for name, site in sites if not site_is_subsample(site)}
    return {name: torch.randn(S, *shape) for name, shape in shapes.items()}


def taps_of(
    model: Any, values: Values, args: Any = (), minibatches: Any = None, budget: int = 2**26
) -> LayerTaps:
    """Taps behind the layers of all latent sites, checked at the first particle."""
    taps = LayerTaps(model, values, budget)
    check_taps(taps, values, {}, args, {}, minibatches or Minibatches())
    return taps


def by_taps(
    taps: Any, values: Values, args: Any = (), minibatches: Any = None, chunk_size: Any = None
) -> Values:
    """As BatchedELBO does it: one backward pass of the average over particles."""
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}

    def log_joint(sites: Any) -> Tensor:
        kept = [
            site
            for site in sites.values()
            if not site_is_subsample(site) and site_kind(site) != "deterministic"
        ]
        return torch.stack([site_log_prob(site)[1].sum() for site in kept]).sum()

    S = len(next(iter(values.values())))
    how: Any = {"minibatches": minibatches or Minibatches(), "chunk_size": chunk_size}
    log_p = run_particles(taps, log_joint, leaves, S, args, {}, **how)
    (-log_p.sum() / S).backward()
    return taps.squared_gradients(S)


def expected(model: Any, values: Values, args: Any = (), indices: Any = None) -> Values:
    """The average over particles of sum_i scale_i mask_i g_i^2, from the Jacobian."""
    total: Values = {}
    S = len(next(iter(values.values())))
    scale: Any = None
    for s in range(S):

        def log_probs(one: Values) -> Tensor:
            nonlocal scale
            batched = {name: value[None] for name, value in one.items()}
            site = batched_trace(model, batched, args, indices=indices).sites["y"]
            scale = site.scale
            return scale_and_mask(site.unscaled_log_prob, 1.0, site.mask)[0].flatten()

        J: Any = jacrev(log_probs)({name: value[s] for name, value in values.items()})
        for name in values:
            total[name] = total.get(name, 0.0) + J[name].square().sum(0) * scale / S
    return total


def assert_same(got: Values, want: Values, *names: str) -> None:
    assert set(got) == set(names)
    for name in names:
        assert want[name].abs().max() > 1e-3  # or the comparison would say nothing
        torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-10)


def linear() -> None:
    observe(F.linear(inputs(N, 3), latent("w", 2, 3), latent("b", 2)).tanh())


def linear_shared_over_time() -> None:
    h = F.linear(inputs(N, 4, 3), latent("w", 2, 3), latent("b", 2)).tanh()
    observe(h.prod(1))


def bias_only() -> None:
    observe(F.linear(inputs(N, 3), inputs(2, 3), latent("b", 2)).tanh())


def two_layers() -> None:
    h = F.linear(inputs(N, 3), latent("w", 4, 3), latent("b", 4))
    observe(F.linear(F.relu(h, inplace=True), latent("w2", 2, 4)))


def matrix_products() -> None:
    h = (inputs(N, 3) @ latent("w", 3, 4) + latent("b", 4)).tanh()
    observe(torch.matmul(h, latent("v", 4)) + latent("c", 1).squeeze())


def conv1d() -> None:
    x = inputs(N, 2, 9)
    observe(F.conv1d(x, latent("w", 3, 2, 4), latent("b", 3), 2, 3, 2).tanh().sum(-1))


def conv2d() -> None:
    x = inputs(N, 2, 6, 7)
    h = F.conv2d(x, latent("w", 3, 2, 3, 2), latent("b", 3), stride=(2, 1), padding=(1, 0))
    observe(F.conv2d(h.tanh(), latent("w2", 2, 3, 3, 3), padding="same").tanh().sum((2, 3)))


def conv2d_with_groups() -> None:
    h = F.conv2d(inputs(N, 4, 6, 6), latent("w", 6, 2, 3, 3), None, 3, 1, 1, 2)
    observe(h.tanh().sum((2, 3)))


def conv3d() -> None:
    h = F.conv3d(inputs(N, 2, 4, 4, 4), latent("w", 2, 2, 2, 3, 2), stride=(1, 2, 1))
    observe(h.tanh().sum((2, 3, 4)))


def transposed_convolutions() -> None:
    h = F.conv_transpose1d(inputs(N, 2, 5), latent("w", 2, 3, 3), latent("b", 3), 2, padding=1)
    observe(h.tanh().sum(-1))


def transposed_convolution_with_groups() -> None:
    x = inputs(N, 2, 4, 3)
    h = F.conv_transpose2d(
        x, latent("w", 2, 2, 2, 3), stride=(1, 2), groups=2, output_padding=(0, 1)
    )
    observe(h.tanh().sum((2, 3)))


def embedding_with_repeats() -> None:
    words = torch.tensor([[0, 2, 2], [1, 1, 1], [3, 0, 3], [2, 1, 0], [4, 4, 0]])
    observe(F.embedding(words, latent("w", 6, 2), padding_idx=4).tanh().prod(1))


def embedding_of_one() -> None:
    words = torch.tensor([0, 2, 2, -1, 0])
    observe(latent("w", 4, 2)[words].tanh() + latent("b", 4)[words].unsqueeze(-1))


def weight_used_twice() -> None:
    w, b = latent("w", 3, 3), latent("b", 3)
    h = F.linear(inputs(N, 3), w, b).tanh()
    observe(F.linear(F.linear(h, w, b).tanh(), w))


def tied_embedding() -> None:
    w = latent("w", 4, 3)
    observe(
        F.linear(F.embedding(torch.tensor([[0, 1], [2, 2], [3, 0], [1, 3], [2, 1]]), w), w).sum(1)
    )


def tied_and_transposed() -> None:
    w = latent("w", 2, 3)
    observe(F.linear(F.linear(inputs(N, 3), w).tanh(), w.T))


def one_vector_of_weights() -> None:
    w = latent("w", 3 * 4 + 4 + 4 * 2)
    first, rest = w[:12], w[12:]
    bias, second = rest.split([4, 8])
    h = (inputs(N, 3) @ first.view(3, 4) + bias).tanh()
    observe(F.linear(h, second.reshape(4, 2).mT))


NETWORK = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def through_functional_call() -> None:
    weights = {name: latent(name, *p.shape) for name, p in NETWORK.named_parameters()}
    observe(functional_call(NETWORK, weights, inputs(N, 3)))


def scales() -> None:
    h = inputs(N, 3) * latent("w", 3) + latent("b", 3)
    observe((latent("c").squeeze() * h.tanh()).mul(latent("v", 1, 3)))


def scales_of_one_number() -> None:
    observe((inputs(N, 1) * latent("w", 3)).tanh() * latent("c", 1))


def layer_norm() -> None:
    h = F.layer_norm(
        F.linear(inputs(N, 3), latent("v", 4, 3)), (4,), latent("w", 4), latent("b", 4)
    )
    observe(h.tanh())


def layer_norm_over_time() -> None:
    h = F.layer_norm(inputs(N, 6, 3), (3,), latent("w", 3), latent("b", 3), eps=0.1).tanh()
    observe(F.rms_norm(h, (3,), latent("v", 3), eps=0.2).tanh().sum(1))


def group_norm() -> None:
    h = F.conv2d(inputs(N, 2, 5, 5), latent("v", 4, 2, 3, 3))
    h = F.group_norm(h, 2, latent("w", 4), latent("b", 4)).tanh()
    observe(h.sum((2, 3)))


def batch_norm_with_running_statistics() -> None:
    mean, variance = inputs(4), 1.0 + inputs(4).square()
    h = F.conv1d(inputs(N, 2, 5), latent("v", 4, 2, 3))
    h = F.batch_norm(h, mean, variance, latent("w", 4), latent("b", 4)).tanh()
    observe(h.sum(-1))


def prelu() -> None:
    h = F.prelu(F.conv1d(inputs(N, 2, 5), latent("v", 3, 2, 3)), latent("w", 3))
    observe(F.prelu(h.sum(-1), latent("b", 1)))


def scale_used_twice() -> None:
    w = latent("w", 3)
    observe((inputs(N, 3) * w).tanh() * w + F.layer_norm(inputs(N, 3), (3,), w))


CASES: dict[Callable[[], None], tuple[str, ...]] = {
    linear: ("w", "b"),
    linear_shared_over_time: ("w", "b"),
    bias_only: ("b",),
    two_layers: ("w", "b", "w2"),
    matrix_products: ("w", "b", "v", "c"),
    conv1d: ("w", "b"),
    conv2d: ("w", "b", "w2"),
    conv2d_with_groups: ("w",),
    conv3d: ("w",),
    transposed_convolutions: ("w", "b"),
    transposed_convolution_with_groups: ("w",),
    embedding_with_repeats: ("w",),
    embedding_of_one: ("w", "b"),
    weight_used_twice: ("w", "b"),
    tied_embedding: ("w",),
    tied_and_transposed: ("w",),
    one_vector_of_weights: ("w",),
    scales: ("w", "b", "c", "v"),
    scales_of_one_number: ("w", "c"),
    layer_norm: ("v", "w", "b"),
    layer_norm_over_time: ("w", "b", "v"),
    group_norm: ("v", "w", "b"),
    batch_norm_with_running_statistics: ("v", "w", "b"),
    prelu: ("v", "w", "b"),
    scale_used_twice: ("w",),
    through_functional_call: ("0.weight", "0.bias", "2.weight", "2.bias"),
}
