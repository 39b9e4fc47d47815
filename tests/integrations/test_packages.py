"""Missing and unsupported versions of packages; the packages need not be installed."""

from __future__ import annotations

import importlib.metadata

import pytest

from blockscale.errors import MissingPackageError, VersionError
from blockscale.integrations.packages import check_package


def test_other_versions_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.1")
    with pytest.raises(VersionError, match=r"torchtitan 0\.2\.1 is installed.*supports torchtitan 0\.3\.\*"):
        check_package("torchtitan", "0.3.", "titan", "why")


def test_a_missing_package_is_an_import_error():
    with pytest.raises(MissingPackageError, match=r"in a checkout of blockscale: pip install -e '\.\[titan\]'"):
        check_package("no-such-package-at-all", "0.3.", "titan", "why")
    assert issubclass(MissingPackageError, ImportError)
    assert not issubclass(VersionError, ImportError)  # torchtitan would swallow an ImportError
