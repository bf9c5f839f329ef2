"""Skips what this machine cannot run; keep it light, it is imported before every test run."""

from __future__ import annotations

import shutil

import hypothesis
import pytest

# No time limit per example: the first one pays for lazy imports, and the machine may be busy with a fleet.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_accelerator():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))
    if not any(shutil.which(name) for name in _BROWSERS):
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason="no Chromium on this machine"))


def _has_accelerator() -> bool:
    import torch  # only where a test asks for one

    return torch.accelerator.is_available()
