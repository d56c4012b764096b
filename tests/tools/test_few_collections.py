"""The garbage collector of a command, and what is left of its settings afterwards."""

from __future__ import annotations

import gc

import pytest

from hf_pyao.tools.few_collections import (
    COLLECTION_THRESHOLDS,
    collections_paused,
    few_collections,
    importing,
)


def test_a_command_leaves_the_collector_as_it_was() -> None:
    before = (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count())
    with pytest.raises(ImportError):
        with few_collections():
            assert gc.get_threshold() == COLLECTION_THRESHOLDS
            with importing():
                assert not gc.isenabled()
            assert gc.isenabled()
            assert gc.get_freeze_count() > 0
            with few_collections(), collections_paused():
                assert not gc.isenabled()
            with importing():
                raise ImportError
    assert (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()) == before
