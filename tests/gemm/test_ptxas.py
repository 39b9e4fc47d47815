"""Choice of ptxas: the order, objections, the environment variables, and binaries that do not answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blockscale.errors import OptionError
from blockscale.gemm import _ptxas
from blockscale.gemm._ptxas import ALLOWED, Ptxas, choose, probe, version_of
from blockscale.hardware import cuda_driver

OLD = Ptxas("/wheel/ptxas", (12, 8, 93), "own")
OTHER = Ptxas("/wheel/ptxas-blackwell", (12, 9, 86), "other")
TOOLKIT = Ptxas("/cuda/bin/ptxas", (13, 0, 88), "toolkit")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No environment variables, empty caches."""
    for name in (_ptxas.SETTING, *_ptxas.TRITON_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_ptxas, "_failures", [])
    for cache in (_ptxas.resolve, version_of):
        cache.cache_clear()
    yield
    for cache in (_ptxas.resolve, version_of):
        cache.cache_clear()


def fake(path: Path, version: str) -> str:
    """A program that answers as a ptxas of that version does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version[:4]}, V{version}'\n")
    path.chmod(0o755)
    return str(path)


def test_first_candidate_without_objection() -> None:
    found = choose([OLD, OTHER, TOOLKIT], OLD.path, (3, 6), driver=13)
    assert found.ptxas is OTHER
    assert found.refused == ("ptxas 12.8.93 (own) is older than 12.9",)
    assert ALLOWED[(3, 6), OTHER.version] in found.reason


def test_order_of_candidates_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALLOWED, ((3, 6), TOOLKIT.version), "by hand")
    assert choose([OLD, TOOLKIT, OTHER], OLD.path, (3, 6), driver=13).ptxas is TOOLKIT


def test_tritons_own_needs_no_entry() -> None:
    own = Ptxas("/wheel/ptxas-blackwell", (13, 4, 59), "own")
    found = choose([own, TOOLKIT], own.path, (3, 9), driver=13)
    assert found.ptxas is None
    assert "13.4.59" in found.reason


def test_the_driver_limits_the_major_version() -> None:
    assert choose([OLD, TOOLKIT, OTHER], OLD.path, (3, 6), driver=12).ptxas is OTHER
    found = choose([OLD, TOOLKIT], OLD.path, (3, 6), driver=12)
    assert found.ptxas is None
    assert "CUDA 13 on, and this driver is of CUDA 12" in str(found)


def test_without_a_driver_tritons_default_stays() -> None:
    found = choose([OLD, OTHER, TOOLKIT], OLD.path, (3, 6), driver=None)
    assert found.ptxas is None
    assert "there is none" in str(found)


def test_only_allowed_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = choose([OLD, OTHER], OLD.path, (3, 7), driver=13)
    assert found.ptxas is None
    assert f"{_ptxas.UNLISTED} 3.7" in str(found)
    near = Ptxas(OTHER.path, (12, 9, 41))
    assert choose([near], OLD.path, (3, 6), driver=13).ptxas is None, "the build number counts"
    monkeypatch.setitem(ALLOWED, ((3, 7), OTHER.version), "by hand")
    assert choose([OLD, OTHER], OLD.path, (3, 7), driver=13).ptxas is OTHER


def test_binaries_that_do_not_answer_are_dropped(tmp_path: Path) -> None:
    silent, broken, text = tmp_path / "silent", tmp_path / "broken", tmp_path / "text"
    silent.write_text("#!/bin/sh\necho hello\n")
    broken.write_text("#!/bin/sh\necho V12.9.86; exit 3\n")
    for path in (silent, broken):
        path.chmod(0o755)
    text.write_text("not a program")
    good, new = fake(tmp_path / "good", "12.9.86"), fake(tmp_path / "new", "13.0.88")
    places = [("none", str(tmp_path / "none")), ("silent", str(silent)), ("broken", str(broken)), ("text", str(text))]
    found = probe([*places, ("good", good), ("new", new)])
    assert [(one.origin, one.version) for one in found] == [("good", (12, 9, 86)), ("new", (13, 0, 88))]


def test_version_is_cached(tmp_path: Path) -> None:
    path = Path(fake(tmp_path / "ptxas", "12.9.86"))
    assert version_of(str(path)) == (12, 9, 86)
    path.unlink()
    assert version_of(str(path)) == (12, 9, 86)


def test_order_of_locations(tmp_path: Path) -> None:
    """Triton's own, then the other one in its wheel."""
    for own, other in (("ptxas", "ptxas-blackwell"), ("ptxas-blackwell", "ptxas")):
        found = _ptxas._places(str(tmp_path / own), tmp_path)
        assert [path for _, path in found] == [str(tmp_path / own), str(tmp_path / other)]


@pytest.mark.parametrize("name", _ptxas.TRITON_VARIABLES)
def test_tritons_variables_win(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ptxas, "cuda_driver", lambda: 13)
    monkeypatch.setenv(name, "/somewhere/ptxas")
    found = _ptxas.choice()
    assert found.ptxas is None
    assert f"{name}=/somewhere/ptxas is set" in found.reason


def test_forced_ptxas_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over Triton's variables and the list; `default` selects Triton's."""
    path = fake(tmp_path / "ptxas", "12.9.1")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/somewhere/ptxas")
    monkeypatch.setenv(_ptxas.SETTING, path)
    found = _ptxas.choice()
    assert found.ptxas == Ptxas(path, (12, 9, 1), _ptxas.SETTING)
    monkeypatch.setenv(_ptxas.SETTING, "default")
    assert _ptxas.choice().ptxas is None
    assert _ptxas.SETTING in _ptxas.choice().reason


def test_forced_path_must_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "ptxas")
    monkeypatch.setenv(_ptxas.SETTING, path)
    with pytest.raises(OptionError, match=r"Rule: it is 'default' or the path .* Fix: correct the path") as raised:
        _ptxas.choice()
    assert f"BLOCKSCALE_PTXAS={path!r}" in str(raised.value)


def test_forced_ptxas_must_suit_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ptxas, "cuda_driver", lambda: 12)
    monkeypatch.setenv(_ptxas.SETTING, fake(tmp_path / "ptxas", "13.0.88"))
    with pytest.raises(OptionError, match="is of CUDA 13, and the driver is of CUDA 12"):
        _ptxas.choice()


def test_after_a_failure_tritons_ptxas_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _ptxas.disable("it broke")
    assert str(_ptxas.choice()) == "Triton's default: it broke"
    monkeypatch.setenv(_ptxas.SETTING, fake(tmp_path / "ptxas", "12.9.86"))
    assert _ptxas.choice().ptxas is not None, "a forced ptxas is still used"


def test_driver_version_comes_from_libcuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """None if there is no driver, or if it returns an error."""

    class Driver:
        status = 0

        def cuDriverGetVersion(self, version: Any) -> int:
            version._obj.value = 13020
            return self.status

    asked: list[str] = []

    def load(name: str) -> Driver:
        asked.append(name)
        return Driver()

    monkeypatch.setattr("ctypes.CDLL", load)
    assert cuda_driver() == 13
    assert asked == ["libcuda.so.1"]
    monkeypatch.setattr(Driver, "status", 100)
    assert cuda_driver() is None

    def missing(name: str) -> Driver:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert cuda_driver() is None


def test_label_has_no_path() -> None:
    assert _ptxas.Choice(None, "why").label == "Triton's ptxas"
    one = _ptxas.Ptxas("/somewhere/ptxas", (12, 9, 86))
    assert _ptxas.Choice(one, "why").label == "ptxas 12.9.86"
