"""Make `.venv`, the environment of the Makefile's commands, or `.venv-next`, by pip. Usage: `make setup`.

What pip and uv cannot do, and this file does:
- borrow the torch of the Python that runs it, if it is new enough and sees a GPU, and install the rest beside it;
- leave out the pins of constraints.txt that would replace that torch, or a triton that a build of torch brings;
- without network, go on with the packages of the machine;
- install torchtitan without wandb; return at once if nothing has changed since the last call.

Options come from the environment, and stay in force until others are given:

    SYSTEM_TORCH=1     use the torch of this Python; 0: never; unset: if it is new enough and sees a GPU
    TORCH_INDEX=URL    the package index to install torch from

`setup_venv.py next` makes `.venv-next`: the same torch with the newest triton, and what its tests need. Standard
library only. An old Python must reach the message that it is too old.
"""

import hashlib
import json
import os
import re
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEXT = sys.argv[1:] == ["next"]
VENV = ROOT / (".venv-next" if NEXT else ".venv")
PYTHON = VENV / "bin" / "python"
STAMP = "blockscale-setup.json"
# The Makefile reads it, so that a Python that was named once need not be named again.
MADE_BY = VENV / "made-by"
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
EXTRAS = ["cli"] if NEXT else ["cli", "plot", "train", "transformers", "dev"]
# Beside the extras: what the tests of compiled and interpreted kernels import.
NEXT_PACKAGES = ["numpy", "pytest", "pytest-xdist"]
STACK = {"torch", "triton", "numpy"}
# torchtitan asks for it, imports it only for its own logs, and finding a version that fits takes pip minutes.
NOT_NEEDED = {"wandb"}


class SetupError(Exception):
    """Set-up cannot go on; the message says why and what to do."""


def main():
    """Bring `.venv` up to date."""
    if sys.version_info < OLDEST_PYTHON:
        raise SetupError(
            f"Blockscale needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}.\n"
            "Fix: name a newer one, for example `make setup PYTHON=python3.12`."
        )
    if Path(sys.prefix).resolve() == VENV.resolve():  # it may have to be replaced
        maker = MADE_BY.read_text().strip() if MADE_BY.exists() else sys._base_executable
        os.execv(maker, [maker, *sys.argv])
    stamp = read_stamp(VENV)
    last = stamp.get("options") or (read_stamp(ROOT / ".venv").get("options", {}) if NEXT else {})
    options = {name: os.environ.get(name) or last.get(name, "") for name in ("SYSTEM_TORCH", "TORCH_INDEX")}
    if options["SYSTEM_TORCH"] not in ("", "0", "1"):
        raise SetupError(f"SYSTEM_TORCH is {options['SYSTEM_TORCH']!r}.\nFix: use 1 (this Python's torch) or 0.")
    wanted = fingerprint(options)
    if stamp.get("installed") == wanted:
        print(f"{VENV.name} is up to date: {stamp['summary']}")
        return
    print(f"Setting up {VENV.name} with Python {sys.version.split()[0]}", flush=True)
    borrowed = find_system_torch(options["SYSTEM_TORCH"])
    base = {"python": sys.executable, "version": sys.version, "root": str(ROOT), "borrowed": borrowed}
    if stamp.get("base") != base:
        create_venv(borrow=borrowed is not None)
        (VENV / STAMP).write_text(json.dumps({"base": base}))
        MADE_BY.write_text(sys.executable + "\n")
    if borrowed:
        install_beside()
    else:
        install_all(options["TORCH_INDEX"])
    summary = check_torch(borrowed)
    done = {"base": base, "options": options, "installed": wanted, "summary": summary}
    (VENV / STAMP).write_text(json.dumps(done, indent=1))
    print(f"Ready: {summary}")


def read_stamp(venv):
    """What the last set-up left: `base` once the environment exists, the rest once it is complete."""
    try:
        return json.loads((venv / STAMP).read_text()) if (venv / "bin" / "python").exists() else {}
    except (OSError, ValueError):
        return {}


def fingerprint(options):
    """A digest of everything that set-up depends on and that is known without importing torch."""
    project = read_project()
    seen = [project["project"], project["build-system"], (ROOT / "constraints.txt").read_text()]
    seen += [Path(__file__).read_text(), str(ROOT), sys.executable, sys.version, installed_version("torch"), options]
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()


def read_project():
    """The content of pyproject.toml."""
    import tomllib  # not in an older Python, which must reach main()

    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def installed_version(package):
    """The version of a package that the running Python has, or None."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_system_torch(option):
    """The version of this Python's torch if `.venv` is to borrow it, else None; an error if SYSTEM_TORCH=1 forbids."""
    if option == "0" or (not option and installed_version("torch") is None):
        return None
    torch = ask_torch(sys.executable)
    version = tuple(map(int, re.findall(r"\d+", torch.get("version", "0.0"))[:2]))
    if "error" in torch or version < OLDEST_TORCH:
        why = torch.get("error") or f"{torch['version']} is too old"
        if option:
            raise SetupError(
                f"SYSTEM_TORCH=1, but the torch of {sys.executable} does not serve: {why}.\n"
                "Fix: install torch 2.11 or newer there, name another Python (PYTHON=...), or leave SYSTEM_TORCH out."
            )
        print(f"  the torch of {sys.executable} does not serve ({why.splitlines()[-1]}): installing another")
        return None
    if not option and not torch["gpu"]:
        return None
    print(f"  using torch {torch['version']} of {sys.executable} (SYSTEM_TORCH=0 installs another)", flush=True)
    return torch["version"]


def ask_torch(python):
    """Import torch in a child process; returns its `version`, `cuda`, `gpu` and `triton`, or the `error`."""
    code = (
        "import json, torch\n"
        "gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None\n"
        "try: import triton\n"
        "except ImportError: triton = None\n"
        "found = dict(version=torch.__version__, cuda=torch.version.cuda, gpu=gpu)\n"
        "print(json.dumps(dict(found, triton=getattr(triton, '__version__', None))))"
    )
    child = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    if child.returncode:
        return {"error": child.stderr.strip() or f"exit status {child.returncode}"}
    return json.loads(child.stdout.splitlines()[-1])


def create_venv(borrow):
    """Make an empty `.venv`, replacing one that came from another Python or another torch."""
    nested = sys.prefix != sys.base_prefix
    flags = ["--system-site-packages"] if borrow and not nested else []
    # A borrowed environment has pip too, and some have it without the means to install another.
    flags += ["--without-pip"] if borrow and installed_version("pip") else []
    if subprocess.run([sys.executable, "-m", "venv", "--clear", *flags, str(VENV)]).returncode:
        raise SetupError(
            f"{sys.executable} cannot make virtual environments.\n"
            f"Fix: install its venv module (Debian, Ubuntu: `apt install python3.{sys.version_info[1]}-venv`), "
            "or name another Python (PYTHON=...)."
        )
    if borrow and nested:
        # This Python is itself a virtual environment, and the new one would look past it to the Python below.
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
        add_path_file("borrowed", "".join(lines))


def add_path_file(name, lines):
    """Put a .pth file, whose lines Python follows when it starts, into `.venv`."""
    folder = sysconfig.get_path("purelib", "venv", {"base": str(VENV)})
    Path(folder, f"{name}.pth").write_text(lines)


def install_all(torch_index):
    """Install torch, with its pin, so that no later step replaces it; then everything else."""
    pins, extras = read_pins(), EXTRAS
    print("  a CUDA build of torch is about 3 GB; TORCH_INDEX=<URL of an index with CPU builds> avoids that")
    works = pip("install torch", *(["--index-url", torch_index] if torch_index else []), pins["torch"])
    bundled = works and requirements("triton") is not None
    if bundled and any(line.startswith("triton") for line in requirements("torch")):
        del pins["triton"]
        if NEXT:
            print("  this build of torch brings its own triton: there is no newer one to test with it")
    else:
        extras = ["triton", *EXTRAS]
        if NEXT:
            del pins["triton"]
    works = works and pip("install Blockscale and its tools", *editable(extras, pins), *(NEXT_PACKAGES if NEXT else []))
    if not (works and (NEXT or install_torchtitan(pins))):
        raise SetupError(
            "pip failed; what it said is above.\n"
            "Fix: check the network and run the command again. If torch could not be had: take it from another index\n"
            "(TORCH_INDEX=URL), use one that is installed already (SYSTEM_TORCH=1), or, if there is none for Python\n"
            f"{sys.version_info[0]}.{sys.version_info[1]}, name another Python (PYTHON=python3.12)."
        )


def install_torchtitan(pins):
    """Install torchtitan, the extra `titan`, without what its tests do not need; returns whether pip succeeded."""
    if not pip("install torchtitan", "--no-deps", pins["torchtitan"]):
        return False
    lines = [line.split(";") for line in requirements("torchtitan")]
    needed = [line[0].strip() for line in lines if len(line) == 1 and package_name(line[0]) not in NOT_NEEDED]
    return pip("install what torchtitan needs", "--constraint", str(VENV / "constraints.txt"), *needed)


def install_beside():
    """Install everything but torch, or as much as the machine has already if no package can be fetched."""
    pins = {name: pin for name, pin in read_pins().items() if name not in STACK}
    # Most machines that bring their own torch have no network at all: find out soon.
    soon = ["--retries", "1", "--timeout", "15"]
    if not pip("install Blockscale and its tools", *soon, *editable(EXTRAS, pins)):
        print("  continuing with the packages of this machine; to try again, remove .venv")
        add_path_file("blockscale", f"{ROOT / 'src'}\n")
        missing = sorted(name for name in wanted_packages() if installed_version(name) is None)
        print(f"  not here: {', '.join(missing) or 'nothing'}" + (" (what needs them will say so)" if missing else ""))


def pip(task, *arguments):
    """Run `pip install` in `.venv`; returns whether it succeeded. What pip says is shown if it failed."""
    print(f"  {task} ...", flush=True)
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", *arguments]
    child = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if child.returncode:
        print(child.stdout.strip(), flush=True)
    return child.returncode == 0


def editable(extras, pins):
    """The arguments that install this checkout with some extras, under some pins."""
    constraints = VENV / "constraints.txt"
    constraints.write_text("\n".join(pins.values()) + "\n")
    return ["--constraint", str(constraints), "--editable", f"{ROOT}[{','.join(extras)}]"]


def read_pins():
    """The lines of constraints.txt by package name."""
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {package_name(line): line for line in lines if line}


def wanted_packages():
    """The names of the packages that the extras ask for."""
    extras = read_project()["project"]["optional-dependencies"]
    return {package_name(line) for extra in EXTRAS for line in extras[extra]}


def package_name(requirement):
    """The name in a requirement, in the spelling that package indexes compare by."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement).group()).lower()


def requirements(package):
    """The requirements of a package in `.venv`; None if it is not there."""
    code = f"import json; from importlib.metadata import requires; print(json.dumps(requires({package!r}) or []))"
    child = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True)
    return None if child.returncode else json.loads(child.stdout)


def check_torch(borrowed):
    """Import torch from `.venv`, warn if it is not what was meant, and return one line about it."""
    torch = ask_torch(PYTHON)
    if "error" in torch:
        raise SetupError(f"The torch in .venv cannot be imported:\n{torch['error']}\nFix: remove .venv and try again.")
    if borrowed and torch["version"] != borrowed:
        raise SetupError(f"pip hid torch {borrowed} behind {torch['version']}.\nFix: remove .venv, use SYSTEM_TORCH=0.")
    if torch["cuda"] and not torch["gpu"]:
        print("  warning: this torch is a CUDA build and sees no GPU. It works, on the CPU; to save several GB,")
        print("  remove .venv and set TORCH_INDEX=<URL of an index with CPU builds>")
    versions = f"torch {torch['version']}, " + (f"triton {torch['triton']}, " if NEXT else "")
    return versions + (torch["gpu"] or "no GPU")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"\n{error}")
    except KeyboardInterrupt:
        sys.exit("\nStopped; the next call resumes here.")
