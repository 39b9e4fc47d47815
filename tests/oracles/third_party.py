"""Lazy access to the third-party oracles."""

from __future__ import annotations

import importlib
from types import ModuleType

VERIFIED_VERSIONS = {"ml_dtypes": "0.6.0", "onnx": "1.23.2", "gfloat": "0.5.2"}
"""The versions whose deviations from the contract are known and corrected. Pin these."""


class OracleUnavailable(ImportError):
    """A package an oracle is built on is not installed. Catch it (or `ImportError`) and skip the test."""


def third_party(module: str) -> ModuleType:
    """Import `module` (`ml_dtypes`, `gfloat`, `gfloat.formats`, `onnx.numpy_helper`) or raise `OracleUnavailable`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        wanted = f"{package}=={VERIFIED_VERSIONS[package]}" if package in VERIFIED_VERSIONS else package
        raise OracleUnavailable(f"this oracle needs {wanted}: {error}", name=package) from error
