"""Options of every command: unknown ones are refused, listed ones are accepted, and messages name the fix."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
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
NEEDS = {"explain": ["gemm"], "train": ["tiny"], "compare": ["tiny"], "speed": ["tiny"], "advise": ["tiny"]}
# a misspelt option of each command
MISSPELT = {
    "doctor": ("--worker", "--workers"),
    "explain": ("--group", "--groups"),
    "formats": ("--plo", "--plot"),
    "demo": ("--step", "--steps"),
    "bench": ("--peer", "--peers"),
    "warmup": ("--shape", "--shapes"),
    "tune": ("--budge", "--budget"),
    "train": ("--step", "--steps"),
    "compare": ("--recipe", "--recipes"),
    "speed": ("--timeds", "--timed"),
    "advise": ("--gradient-budge", "--gradient-budget"),
    "roofline": ("--recipe", "--recipes"),
}


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands stop where their work begins: the options were accepted."""
    for command in COMMANDS:
        module = importlib.import_module(f"blockscale.cli.{command}")
        if hasattr(module, "main"):
            monkeypatch.setattr(module, "run", lambda *found, **named: pytest.fail(f"ran with {found} {named}"))


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
    first = first or (["llama3-8b"] if command in ("warmup", "tune") else [])
    assert refused(capsys, command, *first, "stray").startswith("'stray' belongs to no option.")


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["train", "--dim", "8"], "unknown option --dim 8.", "did you mean --model.dim 8?"),
        (["train", "--eval_every", "8"], "unknown option --eval_every 8.", "did you mean --eval-every 8?"),
        (["train", "--no-resume"], "unknown option --no-resume.", "did you mean --resume?"),
        (["bench", "--no-quick"], "unknown option --no-quick.", "did you mean --quick?"),
        (["train", "--tyro-print-completion", "bash"], "unknown option --tyro-print-completion", "leave"),
        (["compare", "--folder", "out"], "unknown option --folder out. Rule: compare sets it itself", "leave --folder"),
        (["speed", "--steps", "4"], "unknown option --steps 4. Rule: speed sets it itself", "leave --steps out"),
        (["speed", "--since", "4"], "unknown option --since 4. Rule: speed sets it itself", "leave --since out"),
        (["advise", "--rate", "1"], "unknown option --rate 1. Rule: advise sets it itself", "leave --rate out"),
        (["train", "--steps", "x"], "--steps x. Rule: it is an integer", "write --steps 1"),
        (["train", "--steps", "1.5"], "--steps 1.5. Rule: it is an integer", "write --steps 1"),
        (["train", "--rate", "fast"], "--rate fast. Rule: it is a number", "write --rate 0.5"),
        (["train", "--recipe.keep-last", "few"], "Rule: it is an integer or a number", "--recipe.keep-last 1"),
        (["train", "--steps"], "--steps without a value.", "write --steps 1"),
        (["train", "--steps", "--batch", "2"], "--steps without a value.", "write --steps 1"),
        (["train", "--recipe="], "--recipe ''. Rule: it is not empty", "leave --recipe out"),
        (["train", "--folder", ""], "--folder ''. Rule: it is not empty", "leave --folder out"),
        (["train", "--resume=yes"], "--resume=yes. Rule: it is on or off", "write --resume"),
        (["train", "--compile", "block"], "unknown --compile 'block'.", "did you mean blocks?"),
        (["train", "--steps", "2", "--steps", "3"], "--steps and --steps. Rule: an option is given once", "leave one"),
        (["train", "--layers=2", "--model.layers", "3"], "--layers and --model.layers. Rule: an option is", "leave"),
        (["compare", "--recipes"], "--recipes without a value.", "write --recipes"),
        (["compare", "--recipes", ",", "--seeds", "1"], "--recipes without a value.", "write --recipes"),
        (["explain"], "explain without its operation. Rule: it is one of cast,", "blockscale explain cast"),
        (
            ["train", "--recipe", "mxfp8", "125m"],
            "'125m' belongs to no option. Rule: the preset is the first word",
            "write it first: blockscale train 125m --recipe mxfp8.",
        ),
        (
            ["train", "tiny", "--recipe", "mxfp8", "125m", "--resume"],
            "'125m' belongs to no option.",
            "write it first: blockscale train 125m --recipe mxfp8 --resume.",
        ),
        (
            ["compare", "--recipes", "mxfp8", "tiny"],
            "'tiny' belongs to no option.",
            "write it first: blockscale compare tiny --recipes mxfp8.",
        ),
        (
            ["advise", "--top", "3", "125m"],
            "'125m' belongs to no option.",
            "write it first: blockscale advise 125m --top 3.",
        ),
        (["roofline", "llama3-8b"], "'llama3-8b' is a model.", "blockscale roofline --model llama3-8b."),
        (
            ["roofline", "llama3-8b", "--tokens", "8"],
            "is a model.",
            "blockscale roofline --model llama3-8b --tokens 8.",
        ),
        (["doctor", "--help", "--bogus"], "unknown option --bogus.", "leave --bogus out"),
        (["train", "tiny", "--bogus", "--help"], "unknown option --bogus.", "leave --bogus out"),
        (["--version", "--bogus"], "--version with --bogus.", "leave --bogus out"),
        (["--help", "--bogus"], "--help with --bogus.", "leave --bogus out"),
        (["train", "tiny", "steps=5"], "'steps=5' belongs to no option.", "write --steps 5."),
        (["train", "tiny", "-steps", "5"], "'-steps' belongs to no option.", "write --steps 5."),
        (["train", "tiny", "-steps=5"], "'-steps=5' belongs to no option.", "write --steps 5."),
        (["train", "tiny", "eval_every=5"], "'eval_every=5' belongs to no option.", "write --eval-every 5."),
        (["train", "tiny", "resume"], "'resume' belongs to no option.", "write --resume."),
        (["explain", "gem"], "unknown operation 'gem'.", "did you mean gemm"),
        (["explain", "gemm", "--k", "big"], "--k big. Rule: it is an integer", "write --k 1"),
        (["bench", "cast"], "unknown suite 'cast'.", "did you mean casts"),
        (["bench", "cast", "--quick"], "unknown suite 'cast'.", "did you mean casts"),
        (["warmup", "llama3-8b", "-m", "few"], "-m few. Rule: it is an integer", "write -m 1"),
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
        ("formats --plot .png", "--plot x.png."),
        ("formats --plot deep/.svg", "--plot deep/x.png."),
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
        ["-m", "1,16", "128", "llama3-8b"],
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


@pytest.mark.parametrize("command", [["tune"], ["warmup"], ["roofline"], ["roofline", "mlp"]])
@pytest.mark.parametrize(
    ("shapes", "fix"),
    [
        (["4096x4096"], "--shapes 4096,4096."),
        (["4096*1024"], "--shapes 4096,1024."),
        (["4096 1024"], "--shapes 4096,1024."),
        (["(4096,1024)"], "--shapes 4096,1024."),
        (["4096x4096;512x64"], "--shapes 4096,4096 512,64."),
        (["4096,4096", "512x64"], "--shapes 4096,4096 512,64."),
        (["x"], "--shapes 4096,14336."),
        (["1,2,3"], "--shapes 4096,14336."),
        (["0,16"], "--shapes 4096,14336."),
        (["-16,16"], "--shapes 4096,14336."),
    ],
)
def test_malformed_shapes_are_corrected_in_the_fix(
    command: list[str], shapes: list[str], fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *command, "--shapes", *shapes)
    assert "each weight is N,K" in said
    assert said.split("Fix: ")[1].strip() == fix


# ---- help ------------------------------------------------------------------------------------------------------------


def listed(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Options listed by help, short names included."""
    with pytest.raises(SystemExit) as stop:
        main([command, *NEEDS.get(command, []), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    found = re.findall(r"^[│ ] {1,2}(--?[a-z][^\s,]*)", text, re.MULTILINE)
    found += re.findall(r"--[a-z-]+(?= for --)", text) + re.findall(r"(?<= )-[a-z](?=[,.])", text)
    return [flag for flag in found if flag not in ("-h", "--help")]


def accepted(command: str) -> set[str]:
    """Options that the parser accepts."""
    from blockscale.cli.options import options_of, short_options

    module = importlib.import_module(f"blockscale.cli.{command}")
    preset = get_preset("tiny")
    options = options_of(
        preset if command == "train" else module.Options.of(preset) if hasattr(module, "Options") else module.run
    )
    letters = {option.flag[1:] for option in options if len(option.flag) == 3}
    return {option.flag for option in options if not option.is_positional} | {*short_options(options)} | letters


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_what_is_accepted_and_nothing_else(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(command, capsys)
    assert len(found) == len({*found})
    assert {*found} == accepted(command)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_that_help_lists_reaches_the_command(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option parses with a valid value."""
    from blockscale.cli import options

    module, reached = importlib.import_module(f"blockscale.cli.{command}"), list[object]()
    preset = get_preset("tiny")
    if hasattr(module, "main"):
        monkeypatch.setattr(module, "run", lambda *found: reached.append(found) or 0)
        declared = module.Options.of(preset) if hasattr(module, "Options") else preset
    else:
        declared = module.run
    known = {option.flag: option for option in options.options_of(declared)}
    for flag in listed(command, capsys):
        option = known[options.short_options([*known.values()]).get(flag, flag if len(flag) > 2 else f"-{flag}")]
        value = [] if option.takes == "none" else [option.example]
        words = [*NEEDS.get(command, []), flag, *value]
        if hasattr(module, "main"):
            assert main([command, *words]) == 0, words
            reached.pop()
        else:
            found = options.checked(command, words, [*known.values()], {})
            assert any(option.flag in each for each in found), words


@pytest.mark.parametrize("command", ["compare", "speed", "advise"])
def test_help_lists_nothing_that_the_command_sets_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    ours = {
        "compare": "--recipe --recipe.name --folder --resume --export --profile --tensorboard --numerics-every",
        "speed": "--recipe --recipe.name --since --recipe.since --steps --eval-every --eval-batches --log-every "
        "--folder --resume --save-every --keep --export --profile --tensorboard --numerics-every",
        "advise": "--since --recipe.since --steps --eval-every --eval-batches --log-every --save-every --keep --export "
        "--profile --tensorboard --numerics-every --rate --optimizer.rate",
    }[command]
    assert not {*listed(command, capsys)} & {*ours.split()}


def test_run_config_is_independent_of_hidden_options() -> None:
    """It names the folders of runs: a comparison finds earlier ones."""
    from blockscale.cli import advise, compare, speed

    for name in ("tiny", "tiny_moe", "125m", "llama3-8b"):
        preset = get_preset(name)
        assert compare.Options.of(preset).config == preset
        assert type(compare.Options.of(preset).config.recipe) is RecipeConfig
        assert replace(speed.Options.of(preset).config, **_of_speed(preset)) == preset
        assert advise.Options.of(preset).config.model == preset.model


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
        ["warmup", "llama3-8b", "--m", "0"],
        ["warmup", "llama3-8b", "--formats", "mxfp4"],
        ["roofline", "--tokens", "0"],
        ["roofline", "--microbatches", "0"],
        ["roofline", "experts", "--experts", "0"],
        ["demo", "--steps", "0"],
        ["explain", "gemm", "--m", "-1"],
        ["advise", "--tokens", "0"],
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
    return [words for words in split if words and words[0] in COMMANDS and "..." not in words and "|" not in words]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_docs_are_accepted(page: Path) -> None:
    from blockscale.cli.options import checked, options_of, set_by_command, short_options

    for command, *words in commands_of(page):
        module = importlib.import_module(f"blockscale.cli.{command}")
        if hasattr(module, "main"):
            name = words.pop(0) if words and not words[0].startswith("-") else "tiny"
            if "/" in name:  # a run's folder
                declared = module.AdviceOptions()
            else:
                declared = module.Options.of(get_preset(name)) if hasattr(module, "Options") else get_preset(name)
        else:
            declared = module.run
            words = words or NEEDS.get(command, [])
        options = options_of(declared)
        ours = set_by_command(declared) if hasattr(module, "main") else ()
        checked(command, words, options, short_options(options), ours)
