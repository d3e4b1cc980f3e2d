"""Every subject of `make bench` can be started: nothing else imports most of them."""

from __future__ import annotations

import importlib

import pytest

from bench.__main__ import MODULES


@pytest.mark.parametrize("module", MODULES.values())
def test_a_subject_has_a_main_function(module: str) -> None:
    assert callable(importlib.import_module(module).main)
