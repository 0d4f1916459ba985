"""A model at new data, its latent sites fixed at draws from the posterior."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Independent
from torch.utils._pytree import tree_map

from ..linalg.host import own_random_state
from ..runtime.checks import refuse_minibatches
from ..runtime.density import Site, Sites, innermost, site_kind, site_log_prob
from ..runtime.model_density import map_draws, without_plates
from ..runtime.pyro_adapter import first_arguments, is_marked
from ..runtime.run import Minibatches, look, run_plainly
from ..runtime.store import listed
from ..runtime.told_in import told_in
from .draws import compact, sites_of_kind

RETURN = "_RETURN"


class NewData:
    """A model at new arguments, its latent sites but for ``from_prior`` fixed at posterior draws
    ``values`` (S, ...), by site or :func:`to_arviz`'s name; with ``may_lack`` of further ones too."""

    def __init__(
        self,
        model: Callable[..., Any],
        values: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        from_prior: Collection[str] | None = None,
        may_lack: bool = False,
    ) -> None:
        self.model, self.call = model, (args, dict(kwargs))
        self.program = partial(model, *args, **kwargs)
        self.num_samples = len(next(iter(values.values()), ()))
        dotted = {_dotted(name): x for name, x in values.items()}
        #: shapes of one draw of the fit
        self.shapes = {name: x.shape[1:] for name, x in dotted.items()}
        asked = {_dotted(name) for name in from_prior or ()}
        dotted = {name: x for name, x in dotted.items() if name not in asked}
        minibatches = Minibatches()
        try:
            with _AtFirstDraw({name: x[0] for name, x in dotted.items()}):
                ran = look(self.program, {}, minibatches=minibatches)
        except (TypeError, AttributeError) as error:
            way = "Give the data a default (y=None), or any values, torch.zeros(len(X)): they are drawn"
            if "unexpected keyword" in str(error):
                way = "Options of predict are num_samples, sites, from_prior, batch_size and seed"
            raise ValueError(f"The model cannot run on these arguments: {error}. {way}.") from error
        refuse_minibatches(ran, minibatches)
        self.sites = without_plates(ran)
        self.observed = sites_of_kind(self.sites, "observed")
        latent = sites_of_kind(self.sites, "latent")
        if unknown := sorted(asked - self.shapes.keys() - set(map(_dotted, latent))):
            few = listed(latent, 5)
            raise ValueError(f"from_prior names {unknown[0]!r}; the latent sites here are {few}.")
        known = [n for n in self.sites if n in latent or is_marked(self.sites[n])]
        self.values = {name: dotted[_dotted(name)] for name in known if _dotted(name) in dotted}
        others = dotted.keys() - {_dotted(name) for name in self.values}
        if may_lack and self.values:
            others &= {_dotted(name) for name in self.observed}
        if others:
            raise ValueError(
                f"The posterior has draws of {sorted(others)}, which are no latent sites of the "
                f"model here. Is it that of another model, or of a reparametrised one?"
            )
        self.there = [name for name, site in self.sites.items() if site_kind(site) != "factor"]
        #: drawn anew, or deterministic
        self.new = [name for name in self.there if name not in self.values]

    def draw(
        self, names: Collection[str] | None, batch_size: int | None, small: bool = False
    ) -> dict[str, Tensor]:
        """Values of the named sites, (S, ...); with ``small`` large ones are stored in float32."""
        names = self.new if names is None else names
        if unknown := sorted(set(names) - {*self.there, RETURN}):
            raise ValueError(f"sites names {unknown}, but the sites of the model are {self.there}.")

        def returning() -> None:
            pyro.deterministic(RETURN, self.program())

        program = returning if RETURN in names else self.program
        names = [name for name in [*self.there, RETURN] if name in names]
        how = self.num_samples, batch_size, small
        return simulate(program, self.observed, names, self.values, *how)

    def _random(self, names: Collection[str]) -> Sites:
        """Those sites that are not deterministic."""
        return {n: self.sites[n] for n in names if site_kind(self.sites[n]) != "deterministic"}

    @property
    def _plates(self) -> dict[str, int]:
        """Plates of new data, and how many rows they have."""
        drawn = self._random(self.new).values()
        return {frame.name: frame.size for site in drawn for frame in site["cond_indep_stack"]}

    def joint(self, guide: Any) -> list[str]:
        """Warnings about joint draws, as of a process, of another size than in the fit of ``guide``, or
        of what was kept of it: they are conditional on no datum there."""
        drawn = [(name, site["fn"]) for name, site in self._random(self.new).items()]
        drawn = [(name, fn) for name, fn in drawn if innermost(fn).event_dim > 0]
        shapes = self.shapes | (_shapes_in_fit(self.model, guide) if drawn else {})
        return [
            f"The site {name!r} is one joint draw, of shape {tuple(fn.event_shape)} here and "
            f"{tuple(shapes[_dotted(name)])} in the fit: drawn without regard to those data, as of "
            f"another series or field. At new inputs: fit with them too, their data masked; a process "
            f"that is observed itself, as a latent site with noise behind it."
            for name, fn in drawn
            if _dotted(name) in shapes and _is_resized(fn, shapes[_dotted(name)])
        ]

    def new_sites(self) -> list[str]:
        """A warning about latent sites that the fit did not have, where others depend on them."""
        names = [n for n in self.new if site_kind(self.sites[n]) == "latent"]
        names = [n for n in names if _dotted(n) not in self.shapes]
        shared = [n for n in shared_sums(self.sites, self._random(self.new)) if n in names]
        notes = []
        if shared:
            few = listed(shared, 3)
            notes = [
                f"{few}: summed out, and drawn from the prior here, without regard to the data. From "
                f"the posterior: predict(model, fit.to_arviz(discrete=True), ...). For new units: "
                f"from_prior=[{few}]."
            ]
        names = self._followed([n for n in names if n not in shared])
        if not names:
            return notes
        few = listed(names, 3)
        return [
            *notes,
            f"There are no draws of the latent sites {few}: they are drawn from the model, given the "
            f"sites before them. Right for the next steps of a chain and for new units: predict(..., "
            f"from_prior=[{few}]) says so.",
        ]

    def _followed(self, names: Collection[str]) -> list[str]:
        """Those sites, not data then, on which the density of another one depends."""
        random = list(self._random(self.there))
        at = {name: x[0] for name, x in self.values.items()}
        values = {name: self.sites[name]["value"] for name in names if name != random[-1]}
        free = {n: x.detach().requires_grad_() for n, x in values.items() if x.is_floating_point()}
        if not free:
            return []
        slopes: Any = ()
        with suppress(Exception), torch.enable_grad(), pyro.validation_enabled(False):
            at |= {name: x.clone() for name, x in free.items()}
            with own_random_state():
                sites = run_plainly(self.program, at, (), {}, Minibatches())
            terms = [sites[name]["fn"].log_prob(sites[name]["value"].detach()) for name in random]
            whole = torch.stack([term.sum() for term in terms]).sum()
            slopes = torch.autograd.grad(whole, [*free.values()], allow_unused=True)
        return [name for name, x in zip(free, slopes, strict=False) if x is not None]

    def same_rows(self) -> list[str]:
        """Warnings about latent vectors with an entry for each row: with fewer rows they have fewer."""
        notes = []
        for plate, size in self._plates.items():
            shapes = {name: self.sites[name]["fn"].shape() for name in self.values}
            alike = [n for n in shapes if size > 1 and size in self.sites[n]["fn"].event_shape]
            if not alike:
                continue
            fewer: Sites = {}
            with suppress(Exception):  # whatever a model has against other arguments
                args, kwargs = tree_map(partial(_without_last, size=size), self.call)
                fewer = look(self.model, {}, args, kwargs)
            notes += [
                f"The latent site {name!r} has an entry for each row in {plate!r} of the fit. The same "
                f"rows? Say predict(..., from_prior=[]). Others: fit with them, masked, or predict by "
                f"an AutoSites guide, which follows to new inputs."
                for name in alike
                if name in fewer and fewer[name]["fn"].shape() != shapes[name]
            ]
        return notes

    def same_units(self) -> list[str]:
        """A warning about latent sites in the plates of new data, if there are any."""
        plates = self._plates
        return [
            f"The latent site {name!r} lies in the plate {frame.name!r} with the new data, whose "
            f"rows are taken for the units that the guide was trained on. For other units: "
            f"predict(..., from_prior=[{name!r}]); from_prior=[] confirms the same."
            for name in self.values
            for frame in self.sites[name]["cond_indep_stack"]
            if frame.vectorized and frame.name in plates
        ]


def shared_sums(sites: Sites, data: Collection[str]) -> list[str]:
    """Sites that are summed out and that several ``data`` have in common: what these say of them counts
    for new data too, where that of a single datum's own, as the label of a mixture, does not."""
    frames = {name: {f.name for f in site["cond_indep_stack"]} for name, site in sites.items()}
    marked = [name for name, site in sites.items() if is_marked(site)]
    around = [frames[name] for name in data if name not in marked]
    return [name for name in marked if any(frames[name] < plates for plates in around)]


def _without_last(x: Any, size: int) -> Any:
    """An argument of the model without its last row, where it has so many."""
    return x[:-1] if isinstance(x, Tensor) and x.shape[:1] == (size,) else x


def simulate(
    model: Callable[[], Any],
    observed: Collection[str],
    names: Collection[str],
    values: Mapping[str, Tensor],
    num_samples: int,
    batch_size: int | None,
    small: bool = True,
) -> dict[str, Tensor]:
    """The named sites, (S, ...), where all but ``values`` are drawn from the model, data too."""

    def chosen(sites: Sites) -> dict[str, Tensor]:
        found = {name: sites[name]["value"] for name in names}
        return {n: compact(x, num_samples) if small else x for n, x in found.items()}

    program = SampleObserved(observed)(model)
    return map_draws(program, chosen, values, num_samples, batch_size)


def fixed_parameters(
    model: Callable[[], Any], prototype: Sites, draws: Mapping[str, Tensor]
) -> list[str]:
    """Warnings about what poutine.condition has fixed: one number that others, of more, depend on."""
    observed = sites_of_kind(prototype, "observed")
    numbers = [name for name in observed if prototype[name]["fn"].shape().numel() == 1]
    drawn = [name for name in sites_of_kind(prototype, "latent") if name not in draws]
    others = [name for name in [*observed, *drawn] if name not in numbers]
    if not (numbers and others):
        return []
    at = {name: x[0] for name, x in draws.items()}
    at |= {name: prototype[name]["value"] for name in drawn}

    def terms(*anew: str) -> list[Tensor]:
        # without validation, since data that only give a size may lie outside their support
        with torch.no_grad(), pyro.validation_enabled(False):
            sites = look(SampleObserved(anew)(model), at)
            return [site_log_prob(sites[name])[0].nan_to_num() for name in others]

    before = terms()
    return [
        f"The observed site {name!r} is one number, and others depend on it, as on a parameter "
        f"that poutine.condition has fixed: it counts as data, and is drawn anew. Fix parameters "
        f"by pyro.poutine.do(model, data=...), or in the model."
        for name in numbers
        if not all(map(torch.equal, before, terms(name)))
    ]


class _AtFirstDraw(Messenger):
    """Fixes latent sites at one draw from the posterior, and refuses those of another size."""

    def __init__(self, at: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.at = at

    @told_in("verdicts.md#has-shape-12-in-the-posterior-and-3-here")
    def _pyro_sample(self, msg: Site) -> None:
        value = self.at.get(_dotted(msg["name"]))
        if value is None or msg["is_observed"]:
            return
        name, shape = msg["name"], tuple(msg["fn"].shape())
        if value.shape != shape:
            what = f"here. For units new to the guide: predict(..., from_prior=[{name!r}])"
            if _is_resized(msg["fn"], value.shape):
                what = "here, as one joint draw, which from_prior= takes without regard to the data"
            raise ValueError(
                f"The latent site {name!r} has shape {tuple(value.shape)} in the posterior and {shape} "
                f"{what}. For a function at new inputs: predict by its AutoSites guide, or fit with "
                f"them, masked."
            )
        msg["value"], msg["done"] = value, True


def _shapes_in_fit(model: Callable[..., Any], guide: Any) -> dict[str, Sequence[int]]:
    """Shapes of sites at the data of the fit, as far as a guide or kept draws know them."""
    with suppress(Exception):  # whatever a model has against arguments of then
        if isinstance(guide, AutoGuide):
            sites = look(model, {}, *first_arguments(guide)).items()
            return {_dotted(name): site["fn"].shape() for name, site in sites}
        return {str(n): x.shape for n, x in guide["observed_data"].data_vars.items()}
    return {}


def _is_resized(fn: Any, shape: Sequence[int]) -> bool:
    """Whether draws of dependent entries have another size than in draws of this ``shape``."""
    event = fn.event_shape
    return innermost(fn).event_dim > 0 and tuple(event) != tuple(shape[len(shape) - len(event) :])


def _dotted(name: str) -> str:
    return name.replace("/", ".")  # as to_arviz stores it


class SampleObserved(Messenger):
    """Draws the named observed sites from the model instead of taking their data, in their shape."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = names

    def _pyro_sample(self, msg: Site) -> None:
        if msg["name"] in self.names:
            fn, data = msg["fn"], msg["value"]
            if isinstance(data, Tensor):  # many data of one distribution, perhaps, without a plate
                shape = torch.broadcast_shapes(data.shape, fn.shape())
                msg["fn"] = fn if shape == fn.shape() else _expanded(fn, shape)
            msg["is_observed"], msg["value"], msg["done"] = False, None, False


def _expanded(fn: Any, shape: torch.Size) -> Any:
    """``fn`` with draws of this shape, which it broadcasts to."""
    if isinstance(fn, Independent):
        return _expanded(fn.base_dist, shape).to_event(fn.reinterpreted_batch_ndims)
    return fn.expand(shape[: len(shape) - fn.event_dim])
