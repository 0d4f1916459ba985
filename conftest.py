"""A fresh Pyro for every test and every doctest: seed, parameter store, validation."""

import random
from collections.abc import Iterator

import numpy as np
import pyro
import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_pyro() -> Iterator[None]:
    pyro.clear_param_store()
    # as pyro.set_rng_seed(0), without the stack that torch.manual_seed notes for each kind of device
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    with pyro.validation_enabled():
        yield
    pyro.clear_param_store()
