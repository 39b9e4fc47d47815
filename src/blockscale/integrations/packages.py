"""Version check of the packages that integrations build on."""

from __future__ import annotations

from importlib import metadata

from ..errors import MissingPackageError, VersionError, message, refuse


def check_package(package: str, supported: str, extra: str, why: str) -> None:
    """Raise unless the package is installed with a version that starts with `supported`, such as "0.3.".

    extra: extra of blockscale that installs it.  why: difference of other versions.
    """
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise MissingPackageError(
            message(
                f"{package} is not installed",
                rule=f"this integration builds on {package} {supported}*",
                fix=f"in a checkout of blockscale: pip install -e '.[{extra}]'",
            )
        ) from None
    if not found.startswith(supported):
        refuse(
            f"{package} {found} is installed",
            rule=f"this integration supports {package} {supported}*: {why}",
            fix=f"pip install '{package}=={supported}*'",
            error=VersionError,
        )
