"""What stands at the top, and names that have moved from there."""

from __future__ import annotations

import pytest

import pyro_ngvi as ngvi


@pytest.mark.parametrize("place", ngvi._MOVED)
def test_names_that_moved_still_work_and_say_where_they_are(place: str) -> None:
    for name in ngvi._MOVED[place].split():
        assert name not in ngvi.__all__
        with pytest.warns(DeprecationWarning, match=rf"now pyro_ngvi\.{place}\.{name};"):
            found = getattr(ngvi, name)
        assert found is getattr(getattr(ngvi, place), name)
        assert name in getattr(ngvi, place).__all__


def test_other_names_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = ngvi.Nothing


def test_every_name_at_the_top_exists() -> None:
    for name in ngvi.__all__:
        assert hasattr(ngvi, name)
