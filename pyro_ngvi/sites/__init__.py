"""Gaussian sites for single data: what AutoSites, SitesELBO and CVI are made of."""
