"""A fresh Pyro for every test and every doctest: seed, parameter store, validation."""

from collections.abc import Iterator

import pyro
import pytest


@pytest.fixture(autouse=True)
def fresh_pyro() -> Iterator[None]:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    with pyro.validation_enabled():
        yield
    pyro.clear_param_store()
