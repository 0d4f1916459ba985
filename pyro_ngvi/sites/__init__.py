"""Gaussian sites for single data: the guide AutoSites, its loss SitesELBO, its optimizer CVI.

The guide is Pyro's side of these parts:

* ``structure``: what the model is made of, found at the ``first_call`` (``find``, ``predictor``);
* ``bound_model``: the structure at the arguments of one call, by runs of a ``conditioned_model``;
* ``algebra``: q from the sites of all data, dense, as a chain or with inducing points;
* ``site_parameters``: the sites themselves, and ``data`` that come, go or change;
* ``last_step``: the arguments of the last step, and what became of its data since;
* ``snapshot``: q at one call with all data, for ``influence`` and ``leave_one_out``.
"""

from .cvi import CVI
from .guide import AutoSites
from .loss import SitesELBO

__all__ = ["CVI", "AutoSites", "SitesELBO"]
