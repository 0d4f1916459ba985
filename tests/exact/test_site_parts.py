"""The parts that AutoSites is made of, by themselves."""

import pickle
from copy import deepcopy

import torch

from pyro_ngvi.sites.site_guide import LastStep
from pyro_ngvi.sites.structure import Kept


def test_a_value_is_kept_for_these_objects_and_these_bits() -> None:
    key, x = object(), torch.tensor([1.0, 2.0])
    kept = Kept()
    assert kept.get([key], [x]) is None
    kept.put("value", [key], [x])
    assert kept.get([key], [x.clone()]) == "value"
    assert kept.get([object()], [x]) is None
    assert kept.get([], [x]) is None
    assert kept.get([key]) is None
    for other in (x + 1e-7, x.half(), x[:1], x.clone().requires_grad_(), x.to("meta")):
        assert kept.get([key], [other]) is None
    assert kept.get([key], [x]) == "value"
    kept.put(None)
    assert kept.get() is None


def test_what_is_kept_is_not_copied() -> None:
    kept = Kept("value")
    assert kept.get() == "value"
    for other in (deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert other.get() is None
    beside = kept.copy()
    beside.put("other")
    assert kept.get() == "value" and beside.get() == "other"


def test_a_copy_of_the_last_step_has_no_arguments() -> None:
    last = LastStep()
    last.remember((torch.ones(2),), {}, stale=True)
    last.edited()
    for other in (deepcopy(last), pickle.loads(pickle.dumps(last))):
        assert other.arguments is None and other.plan is None
        assert other.stale and other.edition == 1
