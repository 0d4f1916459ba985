"""What pyro_ngvi/runtime takes for granted of Pyro's private names, in pyro_adapter, store and density.

A failure here says that Pyro has changed: mend the function that it names.
"""

import inspect
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoContinuous, AutoGuideList, AutoMultivariateNormal
from pyro.nn import PyroModule, PyroSample
from pyro.ops.special import safe_log

from pyro_ngvi import AutoMeanFieldNormal
from pyro_ngvi.runtime.pyro_adapter import (
    constraint_of,
    first_arguments,
    has_model,
    kept_whole,
    masks_of,
    model_as_given,
    particle_plate,
    unblocked,
    with_draws_held,
)
from pyro_ngvi.runtime.stand_ins import stand_ins
from pyro_ngvi.runtime.store import claim_name, module_name, rename


def model() -> None:
    pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def test_pyro_keeps_the_name_of_a_module_in_pyro_name() -> None:
    module = PyroModule("some_name")
    assert getattr(module, "_pyro_name", None) == "some_name", (
        "PyroModule no longer keeps its name in `_pyro_name`: find where this Pyro keeps it, and "
        "change module_name() and rename() in pyro_ngvi/runtime/store.py."
    )


def test_pyro_keeps_constraints_in_its_store() -> None:
    pyro.param("factor", torch.eye(2), constraint=dist.constraints.lower_cholesky)
    assert constraint_of("factor") is dist.constraints.lower_cholesky, (
        "ParamStoreDict no longer keeps constraints in `_constraints`: change constraint_of()."
    )
    assert constraint_of("another") is None


def test_pyro_names_parameters_and_sites_after_the_module() -> None:
    guide = AutoMultivariateNormal(model)
    rename(guide, "renamed")
    assert module_name(guide) == "renamed"
    guide()
    names = set(pyro.get_param_store().keys())
    assert names == {"renamed.loc", "renamed.scale", "renamed.scale_tril"}, (
        f"After rename() the parameters of a guide are {sorted(names)}: Pyro no longer derives them "
        f"from `_pyro_name`, so guides of pyro_ngvi may share parameters."
    )


def test_pyro_names_a_part_by_pyro_set_supermodule() -> None:
    method = getattr(PyroModule, "_pyro_set_supermodule", None)
    assert method is not None and list(inspect.signature(method).parameters) == [
        "self",
        "name",
        "context",
    ], (
        "PyroModule._pyro_set_supermodule(name, context) has changed: OwnName in "
        "pyro_ngvi/runtime/store.py overrides it to keep the parts of two lists apart."
    )
    names = []
    for _ in range(2):
        guide = AutoGuideList(model)
        part = AutoMeanFieldNormal(model)
        guide.append(part)
        names.append(module_name(part))
    assert names[0] != names[1], (
        f"The parts of two AutoGuideLists are both called {names[0]!r}: Pyro no longer names parts "
        f"by `_pyro_set_supermodule`, so OwnName in pyro_ngvi/runtime/store.py is not asked."
    )


def test_pyro_keeps_the_model_of_a_guide_in_model() -> None:
    guide = AutoMultivariateNormal(model)
    assert has_model(guide), (
        "AutoGuide no longer keeps its model in `_model`: change has_model() and kept_whole() in "
        "pyro_ngvi/runtime/pyro_adapter.py."
    )
    with kept_whole(guide):
        state = guide.__getstate__()
    assert state["_model"] is None and has_model(guide)
    guide.__getstate__()
    assert not has_model(guide), (
        "Copying a guide of Pyro no longer takes its model away: kept_whole() in "
        "pyro_ngvi/runtime/pyro_adapter.py can go."
    )


def test_pyro_keeps_the_arguments_of_the_first_call_of_a_guide_in_input() -> None:
    def with_arguments(y: Any, size: int = 1) -> None:
        model()

    guide = AutoMultivariateNormal(with_arguments)
    for size in (2, 3):
        guide(0.5, size=size)
    assert first_arguments(guide) == ((0.5,), {"size": 2}), (
        "Traces no longer keep arguments at `_INPUT`: change first_arguments() in "
        "pyro_ngvi/runtime/pyro_adapter.py."
    )


def test_pyro_wraps_the_model_of_a_guide_in_an_init_messenger() -> None:
    blocked = poutine.block(model)
    for given in (model, blocked):
        assert model_as_given(AutoMultivariateNormal(given)) is given, (
            "AutoContinuous no longer wraps its model in one InitMessenger as a partial of (handler, "
            "model): change model_as_given() in pyro_ngvi/runtime/pyro_adapter.py."
        )


def test_pyro_blocks_a_model_by_a_messenger_around_it() -> None:
    twice = poutine.block(poutine.block(model, hide=["x"]), hide=["y"])
    assert unblocked(model) is model
    assert unblocked(twice) is model, (
        "poutine.block(model) is no longer a partial of (BlockMessenger, model): change unblocked() in "
        "pyro_ngvi/runtime/pyro_adapter.py."
    )


def test_pyro_keeps_the_mask_of_a_distribution_in_mask() -> None:
    mask: Any = torch.tensor([True, False])

    def masked() -> None:
        with poutine.mask(mask=False):
            pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).mask(mask).to_event(1))

    site = poutine.trace(masked).get_trace().nodes["x"]
    (outer, outer_dim), (inner, inner_dim) = masks_of(site)
    assert outer is False and outer_dim == 1
    assert torch.equal(inner, mask) and inner_dim == 0


def test_pyro_names_the_plate_of_vectorised_particles() -> None:
    guide = AutoMultivariateNormal(model)
    guide()
    seen = []

    def spied() -> None:
        with poutine.trace() as capture:
            guide()
        seen.append(particle_plate(capture.trace.nodes["_AutoMultivariateNormal_latent"]))

    Trace_ELBO(3, vectorize_particles=True, max_plate_nesting=1).loss(model, spied)
    frame = seen[0]
    assert frame is not None and (frame.size, frame.dim) == (3, -2), (
        "Pyro no longer puts the particles into a plate called num_particles_vectorized: change "
        "particle_plate() in pyro_ngvi/runtime/pyro_adapter.py, or wrong models go unseen."
    )
    Trace_ELBO(3).loss(model, spied)
    with pyro.plate("draws", 3):
        spied()
    assert seen[1:] == [None] * 4


def test_names_are_given_once() -> None:
    wanted = "test_names_are_given_once"
    assert [claim_name(wanted) for _ in range(3)] == [wanted, f"{wanted}_2", f"{wanted}_3"]
    # a name that somebody wanted for himself is not given to another
    claim_name(f"{wanted}_4")
    assert claim_name(wanted) == f"{wanted}_5"


def test_methods_of_autocontinuous_that_the_guides_rely_on() -> None:
    names = ("_setup_prototype", "_init_loc", "_unpack_latent", "_loc_scale", "_create_plates")
    for name in names:
        assert callable(getattr(AutoContinuous, name, None)), (
            f"AutoContinuous.{name} is gone: pyro_ngvi/guides/base.py calls or overrides it."
        )
    guide = AutoMultivariateNormal(model)
    guide()
    assert list(guide._unconstrained_shapes.items()) == [("x", torch.Size([2]))], (
        "AutoContinuous no longer keeps the shapes of its sites, in order, in "
        "`_unconstrained_shapes`: AutoFamily.site_of() in pyro_ngvi/guides/base.py reads them."
    )


def test_pyro_takes_its_safe_logarithm_from_a_class_of_pyro_ops_special() -> None:
    x = torch.tensor([0.0, 1e-20, 0.3, 2.0], dtype=torch.float64, requires_grad=True)
    (theirs,) = torch.autograd.grad(safe_log(x).sum(), x)
    with stand_ins():
        batched = torch.func.vmap(torch.func.grad(safe_log))(x.detach())
        values = torch.func.vmap(safe_log)(x.detach())
    assert torch.equal(values, safe_log(x)), "safe_log no longer looks up `_SafeLog` when called"
    torch.testing.assert_close(batched, theirs)


def test_pyro_keeps_priors_of_attributes_in_pyro_samples() -> None:
    module: Any = PyroModule("part")
    module.scale = PyroSample(dist.LogNormal(0.0, 1.0))
    with poutine.trace() as traced:
        held = with_draws_held(module)
    assert list(traced.trace.nodes) == ["part.scale"] and torch.equal(held.scale, held.scale), (
        "PyroModule no longer keeps PyroSample attributes in `_pyro_samples`, drawn as sites within "
        "`_pyro_context`: change with_draws_held() in pyro_ngvi/runtime/pyro_adapter.py, or a kernel "
        "with priors has other numbers at each read."
    )
    both: list[Any] = [module.scale for _ in range(2)]
    assert not torch.equal(*both) and with_draws_held(held) is held
