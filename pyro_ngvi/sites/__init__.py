"""Gaussian sites for single data: the guide AutoSites, its loss SitesELBO, its optimizer CVI.

* ``structure``: what a model is made of, which ``find`` sees at a few ``probe_points``;
* ``bound_model``: the structure at the arguments of one call, by runs of a ``conditioned_model``;
* ``algebra``: q from the sites of all data, dense, as a chain or with inducing points;
* ``data``: the sites themselves, and data that come, go or change;
* ``kept``: what is kept of the last step, and whether a later call is like it;
* ``site_guide``: Pyro's side of all of it; ``guide``: what a user asks.
"""

from .cvi import CVI
from .guide import AutoSites
from .loss import SitesELBO

__all__ = ["CVI", "AutoSites", "SitesELBO"]
