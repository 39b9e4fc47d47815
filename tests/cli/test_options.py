"""Options of every command: unknown ones are refused, listed ones are accepted, and messages name the fix."""

from __future__ import annotations

import functools
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from blockscale.cli.main import COMMANDS, main
from blockscale.errors import OptionError
from blockscale.train import RecipeConfig, get_preset
from blockscale.train.checks import check
from blockscale.train.config import RunConfig

pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
pytest.importorskip("rich", reason="the command line needs rich, which is not installed")

# required words of each command, so that only the option can be wrong
NEEDS = {
    "explain": ["gemm"],
    "train": ["tiny"],
    "compare": ["tiny"],
    "speed": ["tiny"],
    "advise": ["."],
    "inspect": ["."],
    "convert-checkpoint": [".", "new"],
    "export": [".", "new"],
    "generate": ["."],
}
# a misspelt option of each command
MISSPELT = {
    "doctor": ("--worker", "--workers"),
    "explain": ("--group", "--groups"),
    "formats": ("--error", "--errors"),
    "bench": ("--peer", "--peers"),
    "tune": ("--budge", "--budget"),
    "train": ("--step", "--steps"),
    "compare": ("--recipe", "--recipes"),
    "speed": ("--timeds", "--timed"),
    "advise": ("--gradient-budge", "--gradient-budget"),
    "roofline": ("--recipe", "--recipes"),
    "inspect": ("--layot", "--layout"),
    "convert-checkpoint": ("--formt", "--format"),
    "export": ("--formt", "--format"),
    "generate": ("--tempertaure", "--temperature"),
}


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[object, ...], dict[str, object]]]:
    """Arguments of commands, which stop where their work begins: the options were accepted."""
    found: list[tuple[tuple[object, ...], dict[str, object]]] = []
    for command in (*COMMANDS, "bench_overlap"):
        module = importlib.import_module(f"blockscale.cli.{command.replace('-', '_')}")
        later = functools.wraps(module.run)(lambda *given, **named: found.append((given, named)) or 0)
        monkeypatch.setattr(module, "run", later)
    return found


@pytest.fixture
def nothing_runs(reached: list[object]) -> Iterator[None]:
    yield
    assert not reached


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error message, checked to have its three parts and no other output."""
    assert main(words) == 2, words
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"blockscale: .+ Rule: .+ Fix: .+\n", said.err), said.err
    return said.err.removeprefix("blockscale: ")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("nothing_runs")
def test_an_option_that_does_not_exist_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, command, *NEEDS.get(command, []), "--frobnicate", "7")
    assert said.startswith("unknown option --frobnicate 7.")
    assert f"blockscale {command}" in said
    assert "Fix: leave --frobnicate out" in said
    assert "unknown option --frobnicate 7." in refused(capsys, command, *NEEDS.get(command, []), "--frobnicate=7")
    assert "unknown option -z" in refused(capsys, command, *NEEDS.get(command, []), "-z")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("nothing_runs")
def test_a_prefix_of_an_option_is_refused_and_the_option_proposed(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written, meant = MISSPELT[command]
    said = refused(capsys, command, *NEEDS.get(command, []), written, "3")
    assert said.startswith(f"unknown option {written} 3.")
    assert f"Fix: did you mean {meant} 3?" in said


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("nothing_runs")
def test_a_stray_word_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = NEEDS.get(command) or {"bench": ["casts"], "roofline": ["mlp"]}.get(command, [])
    first = first or (["llama3-8b"] if command == "tune" else [])
    assert refused(capsys, command, *first, "stray").startswith("'stray' belongs to no option.")


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["train", "--dim", "8"], "unknown option --dim 8.", "did you mean --model.dim 8?"),
        (["train", "--no-resume"], "unknown option --no-resume.", "did you mean --resume?"),
        (["bench", "--no-quick"], "unknown option --no-quick.", "did you mean --quick?"),
        (["compare", "--folder", "out"], "unknown option --folder out.", "leave --folder out"),
        (["speed", "--steps", "4"], "unknown option --steps 4.", "leave --steps out"),
        (["train", "--steps", "x"], "--steps: invalid literal for int() with base 10: 'x'. Rule: --steps INT.", "pass"),
        (
            ["train", "--rate", "fast"],
            "could not convert string to float: 'fast'. Rule: --optimizer.rate FLOAT",
            "pass",
        ),
        (["train", "--recipe.keep-last", "few"], "Rule: --recipe.keep-last {None}|INT|FLOAT.", "pass such a value"),
        (["train", "--steps"], "Missing value for argument '--steps'.", "pass such a value"),
        (["train", "--steps", "--batch", "2"], "Missing value for argument '--steps'.", "pass such a value"),
        (["train", "--recipe="], "--recipe ''. Rule: a value is not empty", "leave --recipe out"),
        (["train", "--folder", ""], "--folder ''. Rule: a value is not empty", "leave --folder out"),
        (["train", "--resume=yes"], "'yes' belongs to no option.", "leave yes out"),
        (["train", "--compile", "block"], "'block' for argument '--compile'. Rule: one of ('none', 'blocks')", "pass"),
        (["train", "--steps", "2", "--steps", "3"], "--steps and --steps. Rule: an option is given once", "leave one"),
        (["train", "--layers=2", "--model.layers", "3"], "--layers and --model.layers. Rule: an option is", "leave"),
        (["compare", "--recipes"], "--recipes without a value.", "pass values"),
        (["compare", "--recipes", ",", "--seeds", "1"], "--recipes without a value.", "pass values"),
        (["explain"], "Missing from blockscale explain: {cast,", "blockscale explain --help"),
        (
            ["train", "--recipe", "mxfp8", "125m"],
            "'125m' belongs to no option. Rule: the preset is the first word",
            "write it first: blockscale train 125m.",
        ),
        (["--bogus", "--version"], "unknown command '--bogus'.", "pick a command from that list"),
        (["train", "tiny", "steps=5"], "'steps=5' belongs to no option.", "did you mean --steps 5?"),
        (["train", "tiny", "-steps", "5"], "'-steps' belongs to no option.", "did you mean --steps 5?"),
        (["train", "tiny", "resume"], "'resume' belongs to no option.", "did you mean --resume?"),
        (["explain", "gem"], "invalid choice 'gem' for argument 'operation'.", "pass such a value"),
        (["bench", "cast", "--quick"], "invalid choice 'cast' for argument 'suite'.", "pass such a value"),
        (["tune", "llama3-8b", "-m", "few"], "['few']. Rule: --m [INT [INT ...]]", "pass such a value"),
    ],
)
@pytest.mark.usefixtures("nothing_runs")
def test_invalid_words_are_refused(words: list[str], what: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, *words)
    assert what in said
    assert fix in said.split("Fix: ")[1]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("train tiny --since -1", "pass --since 0 to 99, or leave it out."),
        ("train tiny --since 100", "pass --since 0 to 99, or leave it out."),
    ],
)
def test_the_proposed_fix_is_accepted(
    words: str, fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, *words.split()).split("Fix: ")[1].strip() == fix


# ---- lists -----------------------------------------------------------------------------------------------------------

LISTS = [["a,b", "c"], ["a", "b", "c"], ["a,b,c"], ["a, b ,c,"], ["a,", "b", ",c"]]


@pytest.mark.parametrize("words", LISTS, ids="|".join)
@pytest.mark.parametrize("command", ["compare", "speed", "roofline"])
def test_recipes_are_separated_by_commas_or_spaces(
    command: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names, found = {"a": "fp8_blockwise", "b": "mxfp8", "c": "nvfp4"}, list[tuple[str, ...]]()
    text = [re.sub("[abc]", lambda letter: names[letter[0]], word) for word in words]

    def run(options: object = None, /, recipes: tuple[str, ...] = ()) -> int:
        found.append(getattr(options, "recipes", recipes))
        return 0

    monkeypatch.setattr(f"blockscale.cli.{command}.run", run)
    assert main([command, *NEEDS.get(command, []), "--recipes", *text]) == 0
    assert found == [("fp8_blockwise", "mxfp8", "nvfp4")]


def test_other_lists_use_the_same_separators(monkeypatch: pytest.MonkeyPatch) -> None:
    from blockscale.cli import arguments, speed

    found: list[speed.Options] = []
    monkeypatch.setattr(speed, "run", lambda options: found.append(options) or 0)
    assert main(["speed", "tiny", "--compiles", "none", "blocks", "--weight-casts=step,twice"]) == 0
    assert (found[0].compiles, found[0].weight_casts) == (("none", "blocks"), ("step", "twice"))
    asked: list[object] = []
    monkeypatch.setattr(arguments, "numbers", lambda m, flag: asked.append(m) or arguments.refuse("-", "-", "-"))
    monkeypatch.setattr(arguments, "layers", lambda model, shapes, command: asked.append((model, shapes)))
    for words in (
        ["llama3-8b", "-m", "1,16", "128"],
        ["llama3-8b", "--m", "1", "16", "128"],
        ["llama3-8b", "--m=1,16,128"],
    ):
        asked.clear()
        assert main(["tune", *words]) == 2
        assert asked == [("llama3-8b", ()), (1, 16, 128)]
    for words in (["8,16;32,64"], ["8,16", "32,64"], ["8,16 ; 32,64;"]):
        asked.clear()
        assert main(["tune", "--shapes", *words]) == 2
        assert asked[0] == (None, ("8,16", "32,64"))


@pytest.mark.parametrize("command", [["tune"], ["tune", "--compile-only"], ["roofline"], ["roofline", "mlp"]])
@pytest.mark.parametrize(
    "shapes", [["4096x4096"], ["4096 1024"], ["(4096,1024)"], ["4096,4096", "512x64"], ["1,2,3"], ["0,16"], ["-16,16"]]
)
def test_malformed_shapes_are_refused(
    command: list[str], shapes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *command, "--shapes", *shapes)
    assert said.startswith(f"--shapes {' '.join(map(shlex.quote, shapes))}. Rule: each weight is N,K")
    assert said.split("Fix: ")[1].strip() == "--shapes 4096,14336, for instance."


# ---- help ------------------------------------------------------------------------------------------------------------


VALUES = {"INT": "1", "FLOAT": "0.5", "STR": "WORD", "PATH": "PATH"}


def listed(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Options listed by help, short names included -> a valid value; none for a switch."""
    with pytest.raises(SystemExit) as stop:
        main([command, *NEEDS.get(command, []), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    found: dict[str, list[str]] = {}
    for flag, kind in re.findall(r"^[│ ] {1,2}(--?[a-z][^\s,]*)(?: (\S+))?", text, re.MULTILINE):
        kinds = re.findall("INT|FLOAT|STR|PATH", kind)
        choices = re.findall(r"[{,]([a-z]\w*)", kind)
        assert flag not in found
        found[flag] = [VALUES[kinds[0]]] if kinds else choices[:1]
    for short, full in re.findall(r"(-[a-z-]+) for (--[a-z.-]*[a-z])", text):
        found[short] = found[full]
    return {flag: value for flag, value in found.items() if flag != "-h"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_that_help_lists_reaches_the_command(
    command: str, reached: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each option parses with a valid value, and help lists each."""
    from blockscale.cli.options import options_of, short_options

    module = importlib.import_module(f"blockscale.cli.{command.replace('-', '_')}")
    preset = get_preset("tiny")
    declared = preset if command == "train" else module.Options.of(preset) if hasattr(module, "Options") else module.run
    found, options = listed(command, capsys), options_of(declared)
    assert {*found} == {*options, *short_options(options)}
    for names in (found.keys() & options, found.keys() - options):  # an option and its short name are not given at once
        words = [word for name in sorted(names) for word in (name, *found[name])]
        assert main([command, *NEEDS.get(command, []), *words]) == 0, words
        assert reached.pop()


@pytest.mark.parametrize("command", ["compare", "speed"])
def test_help_lists_nothing_that_the_command_sets_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    ours = {
        "compare": "--recipe --recipe.name --folder --resume --export --profile --tensorboard --numerics-every",
        "speed": "--recipe --recipe.name --since --recipe.since --steps --eval-every --eval-batches --log-every "
        "--folder --resume --save-every --keep --export --profile --tensorboard --numerics-every",
    }[command]
    assert not {*listed(command, capsys)} & {*ours.split()}


def test_run_config_is_independent_of_hidden_options() -> None:
    """It names the folders of runs: a comparison finds earlier ones."""
    from blockscale.cli import compare, speed

    for name in ("tiny", "tiny_moe", "125m", "llama3-8b"):
        preset = get_preset(name)
        assert compare.Options.of(preset).config == preset
        assert type(compare.Options.of(preset).config.recipe) is RecipeConfig
        assert replace(speed.Options.of(preset).config, **_of_speed(preset)) == preset


def _of_speed(preset: RunConfig) -> dict[str, int]:
    names = ("steps", "log_every", "eval_every", "eval_batches", "save_every")
    return {name: getattr(preset, name) for name in names}


# ---- how it is said --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "cli", "python"),
    [
        (["--steps", "0"], "--steps 0. Rule: it is a count from 1 to 2**31 - 1. Fix: pass --steps 1 or", "steps=0"),
        (["--layers", "0"], "--layers 0.", "model.layers=0"),
        (["--since", "-1"], "--since -1 of 100 steps", "recipe.since=-1"),
        (["--sequence", "1"], "pass --sequence 2 or more", "data.sequence=1"),
        (["--rate", "nan"], "--rate nan", "optimizer.rate=nan"),
        (["--optimizer.beta1", "1"], "--optimizer.beta1 1.0", "optimizer.beta1=1.0"),
        (["--eval-batches", "-1"], "--eval-batches -1", "eval_batches=-1"),
        (["--recipe.keep-first", "-1"], "pass --recipe.keep-first 0 or more", "recipe.keep_first=-1"),
        (["--recipe.keep-last", "1.5"], "--recipe.keep-last 1.5", "recipe.keep_last=1.5"),
        (["--profile", "3"], "--profile 3 without a folder. Rule", "profile=3"),
        (["--model.heads", "3"], "--model.heads 3", "model.heads=3"),
    ],
)
def test_errors_of_a_run_are_written_as_options_here_and_as_fields_in_python(
    words: list[str], cli: str, python: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from blockscale.cli import train

    assert cli in refused(capsys, "train", "tiny", *words)
    found: list[RunConfig] = []
    monkeypatch.setattr(train, "run", lambda config: found.append(config) or 0)
    assert main(["train", "tiny", *words]) == 0
    with pytest.raises(OptionError) as raised:
        check(found[0])
    assert python in str(raised.value)
    assert "--" not in str(raised.value)


FIELD = re.compile(r"\b[a-z][a-z_.]*=\S")


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--resume"],
        ["compare", "--seeds", "0"],
        ["compare", "--jobs", "0"],
        ["compare", "--budget", "0"],
        ["compare", "--branch-at", "100"],
        ["compare", "--branch-at", "-1"],
        ["compare", "--branch-at", "5", "--since", "5"],
        ["compare", "--eval-batches", "0"],
        ["speed", "--timed", "1"],
        ["speed", "--warm-up", "0"],
        ["tune", "--budget", "-1", "llama3-8b"],
        ["tune", "--workers", "0", "llama3-8b"],
        ["tune", "llama3-8b", "--m", "0", "--compile-only"],
        ["tune", "llama3-8b", "--formats", "mxfp4", "--compile-only"],
        ["roofline", "--tokens", "0"],
        ["roofline", "--microbatches", "0"],
        ["roofline", "experts", "--experts", "0"],
        ["explain", "gemm", "--m", "-1"],
        ["advise", ".", "--tokens", "0"],
        ["bench", "casts", "--only", "nothing", "--device", "cpu"],
    ],
    ids=" ".join,
)
def test_no_error_is_in_python_syntax(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert not FIELD.search(said), said
    assert f"{next(word for word in words if word.startswith('-'))} " in said


def test_errors_of_subprocesses_name_options(tmp_path: Path) -> None:
    """A run of `compare --jobs 2` that fails in its subprocess."""
    code = (
        "from blockscale.errors import option, write_options\n"
        "from blockscale.cli.options import as_flag\n"
        "from blockscale.compare.side_by_side import side_by_side\n"
        "if __name__ == '__main__':\n"
        "    write_options(as_flag)\n"
        "    print(side_by_side(option, [('recipe.since', 5)], 1))\n"
    )
    (tmp_path / "script.py").write_text(code)
    result = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "['--since 5']", result.stderr


# ---- documents -------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "Makefile", *sorted((ROOT / "docs").rglob("*.md"))]


def commands_of(page: Path) -> list[list[str]]:
    """Commands on a page, in backticks or on separate lines."""
    text = page.read_text().replace("$(DEMO)", "").replace("$(CONVERGENCE)", "").replace("$(ARGS)", "")
    found = [words for each in re.findall(r"`(blockscale [^`]+)`", text) for words in each.split(";")]
    found += re.findall(r"^(?:\$ |\t.*-m )?(blockscale [^`\n]+)$", text, re.MULTILINE)
    split = (shlex.split(each.replace("\n", " "), comments=True)[1:] for each in found)
    return [words for words in split if words and words[0] in COMMANDS and not {"...", "|", "--help"} & {*words}]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_docs_are_accepted(
    page: Path, reached: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in commands_of(page):
        if words[0] == "advise" and words[1:] and "/" in words[1]:
            (tmp_path / words[1]).mkdir(parents=True, exist_ok=True)
        needed = [] if words[1:] else NEEDS.get(words[0], [])
        assert main([*words, *needed]) == 0, words
