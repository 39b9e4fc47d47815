"""Long description of the built package: README.md with links and pictures that work outside the repository.

The build backend calls the hook. In a checkout README keeps relative links, which work on disk and on a forge; an index
page or an installed package has no files beside it, so there every link starts with the URL of the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def absolute_links(text: str, repository: str) -> str:
    """Markdown whose relative targets start with `repository`: pictures as raw files, pages as rendered ones.

    >>> absolute_links("![x](a.svg) [y](docs/b.md#c) [z](https://d)", "https://host/repo")
    '![x](https://host/repo/raw/main/a.svg) [y](https://host/repo/blob/main/docs/b.md#c) [z](https://d)'
    """

    def replace(found: re.Match[str]) -> str:
        kind = "raw" if found[1] else "blob"
        return f"{found[1]}[{found[2]}]({repository}/{kind}/main/{found[3]})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)#][^)]*)\)", replace, text)


class PackageReadme(MetadataHookInterface):
    """The hook that pyproject.toml names."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the long description."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute_links(text, metadata["urls"]["Repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
