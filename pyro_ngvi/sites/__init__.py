"""Gaussian sites for single data: the guide AutoSites, its loss SitesELBO, its optimizer CVI.

* ``structure``: what a model is made of, which ``find`` sees at a few ``probe_points``;
* ``bound_model``: the structure at the arguments of one call, by runs of a ``conditioned_model``;
* ``algebra``: q from the sites of all data, dense, as a chain or with inducing points;
* ``checks``: whether a later call is like the first one and the last step;
* ``site_guide``: Pyro's side of all of it; ``guide``: what a user asks, and data that come or go.
"""

from .cvi import CVI
from .guide import AutoSites
from .integration import IntegratedMarginals, integrate
from .loss import SitesELBO
from .marginals import SiteMarginals

__all__ = ["CVI", "AutoSites", "IntegratedMarginals", "SiteMarginals", "SitesELBO", "integrate"]
