"""Documentation: README's example and commands run, links resolve, no path of a machine is named."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FORMATS_PAGE = (ROOT / "docs" / "formats.md").read_text()
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += [page for folder in ("docs", "benchmarks") for page in sorted((ROOT / folder).rglob("*.md"))]


def test_formats_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", FORMATS_PAGE, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "formats.md", "exec"), names)
    assert "->" in capsys.readouterr().out
    assert names["y"].shape == (300, 512)  # pyright: ignore[reportAttributeAccessIssue]


def test_readme_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_pages_name_real_settings_and_commands() -> None:
    from blockscale import env
    from blockscale.cli.main import COMMANDS

    declared = {variable.name for variable in env.VARIABLES}
    for page in PAGES:
        assert set(re.findall(r"BLOCKSCALE_[A-Z]+", page.read_text())) <= declared | {"BLOCKSCALE_"}, page
        assert set(re.findall(r"`blockscale ([a-z-]+)", page.read_text())) <= set(COMMANDS), page


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as forges make them: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = [re.sub(r"[^\w\- ]", "", line.lower()) for line in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)]
    return {heading.replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    """Files exist, and so do the headings that are linked to."""
    for target in re.findall(r"\]\((?!\w+:)([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_format_table_is_the_real_one() -> None:
    from blockscale.formats import FORMATS

    rows = {}
    for line in FORMATS_PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0].startswith("`"):
            for name in re.findall(r"`([a-z0-9_]+)`", cells[0]):
                rows[name] = cells
    assert set(rows) == set(FORMATS)
    for name, spec in FORMATS.items():
        assert spec.element.name.upper() in rows[name][1]
        assert f"{spec.block[0]}x{spec.block[1]}" in rows[name][2]
        assert f"{spec.bits_per_value:.3g}" in rows[name][4]
        assert f"`{spec.default_rule()}`" in rows[name][5]


@pytest.mark.parametrize("name", ["checkpoints", "experts", "inference", "overlap", "recipes", "training", "weights"])
def test_examples_of_pages_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks run one after the other; each print gives the text of its comment."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), flags=re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, f"{name}.md", "exec"), names)
        said = re.findall(r"^print\(.*\)  # (.*)$", block, flags=re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == said


def test_every_block_of_the_tutorial_prints_its_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile runs without inductor, which takes minutes."""
    text = (ROOT / "docs" / "tutorial.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == text.count("```python") == 9
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    names: dict[str, object] = {}
    for block, said in blocks:
        exec(compile(block, "tutorial.md", "exec"), names)
        assert capsys.readouterr().out == said


def test_recipes_page_has_the_roles_of_every_recipe() -> None:
    from blockscale.autograd import RECIPES
    from blockscale.formats.stochastic import ROLES

    rows = [["recipe", *(role.replace("_", " ") for role in ROLES)], ["---"] * 7]
    rows += [[f"`{key}`", *(str(each.operand(role) or "-") for role in ROLES)] for key, each in RECIPES.items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert table in page, f"the table is now\n{table}"
    chosen = set(re.findall(r"`([a-z0-9_]+)`", page.partition("choose it when")[2].partition("## Why")[0]))
    assert chosen == set(RECIPES)


def test_no_machine_is_named() -> None:
    """Absolute paths do not belong in a repository."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    forbidden = re.compile(r"(?<![\w.])/(?:work|root|home|tmp|opt)/\w")
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in {".md", ".py", ".toml", ".txt", ".json"} and path.exists() and path != Path(__file__):
            assert not forbidden.search(path.read_text()), name
