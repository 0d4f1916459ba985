"""Published results of the Bayesian learning rule for Gaussians, run again with this package."""
