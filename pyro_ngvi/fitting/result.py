"""What one asks of a fit: numbers, tables, pictures, predictions."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import cached_property, partial
from html import escape
from typing import Any

import numpy as np
from torch import Tensor

from .. import diagnostics
from ..diagnostics import Corrected, Diagnosis, KHat
from ..diagnostics.by_chains import by_chains
from ..diagnostics.by_weights import by_weights, can_be_corrected, for_loo, times_for_loo
from ..diagnostics.correction import resampled
from ..diagnostics.draws import guide_draws, random_state
from ..distributed.processes import is_alone
from ..linalg.host import own_random_state
from ..runtime.checks import refuse_minibatches
from ..runtime.told_in import told_in
from ..runtime.waiting import bars_if
from .batches import Epoch
from .ladder import Rung
from .plot import plot_steps
from .progress import gap_of_late
from .structure import Structure
from .ways import flat_in, prior_alone, way_on
from .word import word_on

#: numbers in the draws that are taken unasked
HELD = 50_000_000
#: draws times data for which minibatches are gone through unasked
VALUES = 1_000_000_000
#: data above which their likelihoods and predictions at 1,000 draws are not held unasked: 400 MB each
MANY = 100_000


class Result:
    """A trained guide and how it came about; what is read from it is found when first asked for."""

    svi: Any
    stop: Any
    advice: Any
    batches: Any = None
    distributed: Any = None

    def __init__(self, model: Any, args: Any, kwargs: Any) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.why_stopped: str | None = None
        self.rungs: tuple[Rung, ...] = ()
        self._shows = True  # bars, as ``progress=`` of the last run said
        self._seconds: list[float] = []
        self._forget()

    # --- how it came about

    #: seconds that k-hat took
    _weighing = 0.0

    def record(self, seconds: float) -> None:
        """Note a step."""
        self._forget()
        self._seconds.append(seconds)

    def _forget(self) -> None:
        """What was read before is no longer so."""
        self._loo: dict[str | None, Any] = {}
        for name, held in vars(Result).items():
            if isinstance(held, cached_property):
                vars(self).pop(name, None)

    def put_back(self) -> None:
        """Before anything is read."""

    @property
    def is_spread(self) -> bool:
        """Whether several processes hold the data, which are then all at the same call."""
        return self.distributed is not None and not is_alone()

    @property
    def guide(self) -> Any:
        """The trained guide."""
        self.put_back()
        return self.svi.guide

    @property
    def losses(self) -> np.ndarray:
        """The loss of each step, (steps,), in nats: minus the ELBO of its draws."""
        return np.array(self.stop.losses)

    @property
    def gap(self) -> Any:
        """The nats still to gain at the last look of the stop rule (:class:`Gap`), ``None`` where that
        was before three quarters of the steps."""
        return gap_of_late(self.stop)

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return self.stop.steps

    @property
    def seconds(self) -> float:
        """The seconds that they took in all, with the looks of the stop rule."""
        return sum(self._seconds)

    @property
    def report(self) -> dict[str, np.ndarray]:
        """``loss`` and ``seconds`` of each step, (steps,); ``look``, ``gap``, ``gap_error`` (looks,),
        the step of each look of the stop rule, the nats to go and their standard error."""
        table = np.array([(k, gap.nats, gap.error) for k, gap in self.stop.looks]).reshape(-1, 3)
        found = {"loss": self.losses, "seconds": np.array(self._seconds)}
        return found | dict(zip(("look", "gap", "gap_error"), table.T, strict=True))

    # --- whether to believe it

    @cached_property
    def khat(self) -> KHat:
        """Whether the draws may be taken as they are, from 1,000 of them at a fixed seed, fewer where
        they have more than 5 * 10^7 numbers."""
        model, args = self._call
        start = time.thread_time()  # of this thread: it does not depend on what else a machine does
        how: Any = {"num_samples": self._draws, "seed": 0}
        found = diagnostics.khat(model, self.guide, *args, **how, **self.kwargs)
        self._weighing = time.thread_time() - start
        return found

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """Whether to believe the guide, site by site: :func:`pyro_ngvi.diagnose`."""
        self._need_all_data()
        if self.is_spread:
            raise ValueError(
                "diagnose needs all data on one process. fit.khat has them on several; or load the "
                "fit from its checkpoint in a process that has all."
            )
        with bars_if(self._shows):
            return by_weights(*self._weighed) or by_chains(*self._weighed)

    @property
    def _weighed(self) -> tuple[Any, ...]:
        return self.model, self.guide, self.args, self.kwargs, self.khat

    @cached_property
    def verdict(self) -> KHat | Diagnosis | Corrected:
        """Whether to believe what is read: the word on the guide, or on corrected draws where the
        guide's own show errors; all have ``decision``, ``ok`` and ``verdict``."""
        return getattr(self._word, "corrected", None) or self._word

    @cached_property
    def _word(self) -> KHat | Diagnosis:
        return word_on(self)

    @property
    def _source(self) -> Any:
        """What draws are of: the guide, or that of corrected ones."""
        if can_be_corrected(self.guide) and not (self.is_spread or self._is_stream):
            with suppress(ValueError):  # a guide that is a point in some sites has no verdict
                if isinstance(self.verdict, Corrected):
                    return self.verdict.guide
        return self.guide

    @cached_property
    def _verdict_in_words(self) -> str:
        """The verdict, the way on, and what no data speak of."""
        words = self.verdict.verdict, way_on(self), prior_alone(self._flat)
        return " ".join(filter(None, words))

    @cached_property
    def _flat(self) -> dict[str, bool]:
        """Latent sites that no gradient of the rest reaches, where all data are at hand."""
        if self.is_spread or self._is_stream:
            return {}
        return flat_in(self.model, self.guide, self.args, self.kwargs)

    @property
    def _is_stream(self) -> bool:
        """Whether the data are known by their minibatches alone."""
        return self.batches is not None and not self.args

    @cached_property
    def _first(self) -> Any:
        """The first minibatch."""
        with own_random_state():
            return next(iter(Epoch(self.batches)))

    @property
    def _call(self) -> tuple[Any, Any]:
        """A model of all data, wherever they are, and its arguments."""
        if self.is_spread:
            self._need_all_data()
            return self.svi.program, self.args
        if self._is_stream:
            return diagnostics.OverBatches(self.model, Epoch(self.batches)), self._first
        return self.model, self.args

    @told_in("steps.md#takes-100-of-1000-examples")
    def _need_all_data(self) -> None:
        why = "This needs all data at once, and the fit saw minibatches alone. Give all data as "
        why += "arguments beside data=, or pass model, guide and all data to diagnose or loo."
        if self._is_stream:
            raise ValueError(why)

    @cached_property
    def _structure(self) -> Structure:
        return Structure(self.model, self._call[1], self.kwargs)

    @property
    def _draws(self) -> int:
        most, structure = 1000, self._structure
        if self._is_stream:
            most = int(min(most, VALUES // max(1, structure.data)))
        return max(100, min(most, HELD // max(1, structure.d)))

    @property
    def elbo(self) -> tuple[float, float]:
        """The ELBO, mean_s [log p(data, z_s) - log q(z_s)] in nats, and its standard error."""
        return self.khat.elbo, self.khat.elbo_error

    @property
    def idata(self) -> Any:
        """Draws in ArviZ's container, as :meth:`to_arviz` gives them by default; without the log
        likelihoods and predictions of more than 100,000 data, which :meth:`loo` does not need.  Its
        ``attrs["verdict"]`` is that of k-hat until another is asked for: by ``print``, say."""
        return self._with_verdict(self._idata)

    def _with_verdict(self, idata: Any) -> Any:
        """The container, with the verdict on the fit where that is known."""
        if "verdict" in vars(self):
            words = {"decision": self.verdict.decision, "verdict": self._verdict_in_words}
            idata.attrs.update(words)
        return idata

    @cached_property
    def _idata(self) -> Any:
        held = not (self.is_spread or self._is_stream) and self._structure.data <= MANY
        groups = dict.fromkeys(("log_likelihood", "posterior_predictive"), held)
        return self.to_arviz(num_samples=self._draws, seed=0, **groups)

    def to_arviz(self, **options: Any) -> Any:
        """:func:`pyro_ngvi.to_arviz` of the fit, with its options, ``fit.to_arviz(prior=True)``; no
        numbers by datum where it was given minibatches alone.  Corrected draws, where the verdict says
        so, unless ``corrected=False``.  With ``resample="psis"`` the draws of the
        verdict, if neither ``num_samples`` nor ``seed`` says otherwise."""
        model, args = self._call
        if options.get("resample"):
            options = {"num_samples": self._draws, "seed": 0} | options
        asked = options.pop("corrected", None)
        guide = self.guide if asked is False else self._source
        options["corrected"] = bool(asked)
        found = diagnostics.to_arviz(model, guide, *args, **options, **self.kwargs)
        return found if options.get("resample") or asked is not None else self._with_verdict(found)

    def summary(self, **options: Any) -> Any:
        """ArviZ's table with the verdict under it: :func:`pyro_ngvi.summary`, with its ``options``, as
        ``fit.summary(var_names=["m"])``."""
        self.verdict  # noqa: B018
        return diagnostics.summary(self.idata, **options)

    def loo(self, var_name: str | None = None) -> Any:
        """Leaving out each datum in turn, by weights p / q unless the verdict has no use for them:
        :func:`pyro_ngvi.diagnostics.loo`.  ``var_name`` is the observed site, where there are several.
        ``AutoSites`` knows it better: ``fit.guide.loo()``.  A ``ValueError`` where it saw minibatches
        alone."""
        self._need_all_data()
        if var_name not in self._loo:
            source, how = self._source, {"var_name": var_name, "seed": 0}
            with suppress(ValueError):  # there is none of a guide that is a point in some sites
                how["verdict"] = self.verdict
                better = for_loo(self._word, self._weighed)
                if better is not None and self.verdict.ok:
                    source, how["verdict"] = better.guide, better
            how["num_samples"] = times_for_loo(source) * self._draws
            self._loo[var_name] = diagnostics.loo(
                self._call[0], source, *self.args, **how, **self.kwargs
            )
        return self._loo[var_name]

    # --- draws

    def sample(self, num_samples: int = 1000, seed: int | None = None) -> dict[str, Tensor]:
        """Draws (num_samples, ...) of the latent sites, by name; corrected where :attr:`idata` is, with
        deterministic sites too.  With a ``seed`` they are always the same; without, the random state
        moves on.  A ``ValueError`` where each draw has other units of a plate, that of a minibatch of
        the model's own."""
        if not self._is_stream:
            with suppress(TypeError):  # loaded without its data
                refuse_minibatches(self._structure.part, self._structure.part)
        source = self._source
        with random_state(seed):
            if source is not self.guide:
                return resampled(source, num_samples)
            return guide_draws(partial(source, *self._call[1], **self.kwargs), num_samples)[0]

    def predict(self, *args: Any, **options: Any) -> dict[str, Tensor]:
        """:func:`pyro_ngvi.predict` at new arguments, ``args`` of the model, from such draws, as
        ``fit.predict(X_new, num_samples=500)["y"]`` (500, ...), with its ``options`` and the model's
        keywords."""
        return diagnostics.predict(self.model, self._source, *args, **options)

    # --- to look at

    def plot(self, ax: Any = None) -> Any:
        """The ELBO over the steps, and above its last value the nats that were still to gain.

        In ``ax``, matplotlib's ``Axes``, or those of a new figure, which are returned.
        """
        return plot_steps(self, ax)

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        lines = [f"Fit: {self.advice}"]
        gap = self.gap
        left = f", {gap.nats:.2g} +- {gap.error:.1g} nats to go" if gap is not None else ""
        tier, reason = getattr(self.svi, "tier", ""), getattr(self.svi, "reason", "")
        how = f" ({tier}{', since ' * bool(reason)}{reason})" if tier else ""
        took = f"{self.steps} steps{how}, {self.seconds:.2g} s"
        lines.append(f"{self.why_stopped or 'not ended'} after {took}{left}")
        try:
            verdict, (elbo, error) = self._verdict_in_words, self.elbo
            off = (
                "" if np.isfinite(elbo) else ", as draws of the guide are where there is no density"
            )
            lines.append(f"ELBO {elbo:.2f} +- {error:.2f} nats{off}. {verdict}")
        except Exception as error:  # whatever the guide or the model says of these arguments
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            lines.append(f"No verdict: {reason}")
        return [*lines, *map(str, self.rungs)]

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escape(line)}</p>" for line in self._lines())
