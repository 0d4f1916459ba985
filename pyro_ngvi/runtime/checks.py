"""What an ELBO refuses, site by site: each check raises a sentence with the name and the remedy."""

from collections.abc import Collection, Iterable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from .density import site_log_prob, with_density
from .support import validated_log_prob
from .vmap import Site, Sites


def check_guide_site(site: Site) -> None:
    """Refuse a site of a guide that is enumerated or not reparameterised."""
    _check_enumerated(site)
    if not site["fn"].has_rsample:
        raise ValueError(
            f"The site {site['name']!r} of the guide samples {type(site['fn']).__name__}, which "
            f"is not reparameterised, so no gradient passes through its draws. Use "
            f"pyro.infer.Trace_ELBO, which adds the score function term."
        )


def check_model_site(site: Site, values: Mapping[str, Any]) -> None:
    """Refuse a latent site of a model to which the guide gives no value, or one of other shape."""
    if site["name"] not in values:
        _check_enumerated(site)
        raise ValueError(
            f"The latent site {site['name']!r} of the model is not sampled by the guide. Add it "
            f"to the guide, give it obs=..., or use pyro.infer.TraceEnum_ELBO to sum it out."
        )
    shape, value_shape = site["fn"].shape(), site["value"].shape
    sizes = zip_longest(reversed(shape), reversed(value_shape), fillvalue=1)
    if any(n != m for n, m in sizes):
        raise ValueError(
            f"The latent site {site['name']!r} has shape {tuple(shape)} in the model, but the "
            f"guide gives it shape {tuple(value_shape)}. Is the guide made for another model, or "
            f"for data of another size?"
        )


def check_guide_of_this_model(names: Iterable[str], model_sites: Sites) -> None:
    """Refuse a guide with latent sites, ``names``, that a run of the model does not have."""
    for name in names:
        if name not in model_sites:
            raise ValueError(
                f"The guide samples {name!r}, which is no site of the model, or not of this run of it. "
                f"Is it the guide of another model? Only a variable without a prior that other sites "
                f"are functions of may be infer={{'is_auxiliary': True}}."
            )


def check_replaced_priors(names: Collection[str], guide_sites: Sites, model_sites: Sites) -> None:
    """Refuse another scale or mask in the model for a site whose prior the guide takes back."""
    for name in names:
        if name not in model_sites or name not in guide_sites:
            continue
        ours, theirs = guide_sites[name], model_sites[name]
        scales = torch.as_tensor(ours["scale"]), torch.as_tensor(theirs["scale"])
        masked = any(not (s["mask"] is None or s["mask"] is True) for s in (ours, theirs))
        if masked or not bool((scales[0] == scales[1]).all()):
            raise ValueError(
                f"Model and guide differ in scale or mask at the site {name!r}, which the guide "
                "makes of g: it takes the site's prior back, so a share of it would stay. Scale "
                "both alike, or use BatchedELBO(kl_weight=...) to weigh the KL term."
            )


def _check_enumerated(site: Site) -> None:
    if site["infer"].get("enumerate"):
        raise ValueError(
            f"The site {site['name']!r} asks for enumeration, which BatchedELBO does not do; use "
            f"pyro.infer.TraceEnum_ELBO, or pyro.infer.Trace_ELBO to sample the site."
        )


def check_minibatch(site: Site, shared: Mapping[str, Tensor]) -> None:
    """Refuse a plate of a model whose minibatch is not that of the guide."""
    index, expected = site["value"], shared.get(site["name"])
    if expected is None or index is expected:
        return
    if len(index) != len(expected) or not torch.equal(torch.as_tensor(index), expected):
        raise ValueError(
            f"The plate {site['name']!r} has another minibatch in the model ({len(index)} "
            f"examples) than in the guide ({len(expected)}). Use one subsample_size, or give both "
            "one index: pass create_plates=... to the autoguide, with the plate of the model."
        )


def check_whole_plates(guide: str, sites: Sites) -> None:
    """Refuse latent sites in a subsampled plate to a guide that has one flat vector of them all."""
    for name, site in sites.items():
        for frame in site["cond_indep_stack"]:
            if frame.full_size not in (None, frame.size):
                raise ValueError(
                    f"{guide}: latent site {name!r} lies in the subsampled plate {frame.name!r} "
                    f"({frame.size} of {frame.full_size}). Use the whole plate, or "
                    "AutoGuideList(model, create_plates=f), f the plate, with "
                    f"AutoNormal(poutine.block(model, expose=[{name!r}]))."
                )


def check_log_prob_shape(site: Site, log_prob: Tensor) -> None:
    """Refuse a site whose ``log_prob`` was broadcast to a shape that nothing asks for.

    Inside plates, each dimension larger than 1 must be that of a plate. Outside plates, the shape
    must be that of the value, unless the value is a single event.
    """
    shape = log_prob.shape
    if not shape:
        return
    value, fn = site["value"], site["fn"]
    sizes = {frame.dim: frame.size for frame in site["cond_indep_stack"] if frame.dim is not None}
    batch_shape = value.shape[: value.dim() - fn.event_dim]
    if sizes:
        good = all(n == 1 or sizes.get(i - len(shape)) == n for i, n in enumerate(shape))
        plates = [f"{f.name!r} ({f.size} at dim {f.dim})" for f in site["cond_indep_stack"]]
        given = f"its plates are {', '.join(plates)}"
    else:
        good = shape == batch_shape or batch_shape.numel() == 1
        given = "it is in no plate"
    if not good:
        raise ValueError(
            f"The site {site['name']!r} has a log_prob of shape {tuple(shape)}, but {given} and "
            f"its value has batch shape {tuple(batch_shape)}: shapes were broadcast. Give "
            f"distribution ({tuple(fn.batch_shape)}) and mask its shape (mean.squeeze(-1)?), "
            "events by .to_event(...)."
        )


def check_values(sites: Sites) -> None:
    """Refuse a value outside the support of its site, as far as Pyro's validation is on."""
    for site in with_density(sites).values():
        check_log_prob_shape(site, validated_log_prob(site))


def check_guide(sites: Sites) -> None:
    """Refuse a guide one of whose sites cannot be handled."""
    for site in sites.values():
        if not site_is_subsample(site):
            check_guide_site(site)


def check_model(sites: Sites, values: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
    """Refuse a model one of whose sites does not fit the guide's ``values`` and ``shared`` ones."""
    for site in sites.values():
        if site_is_subsample(site):
            check_minibatch(site, shared)
        elif not site["is_observed"]:
            check_model_site(site, values)


def sum_log_prob(sites: Sites) -> Tensor:
    """The log probability of all sites of one particle, a scalar; each has the shape of its plates."""
    total: Any = None
    for site in with_density(sites).values():
        log_prob = site_log_prob(site)[1]
        check_log_prob_shape(site, log_prob)
        total = log_prob.sum() if total is None else total + log_prob.sum()
    return torch.zeros(()) if total is None else total
