"""Make `.venv`, the environment that the Makefile's commands run in, or `.venv-next`. Usage: `make setup`.

torch decides how. If the Python that runs this file already has a torch that will do, `.venv` borrows it; otherwise
torch is installed first, with its pin, so that no later step can move it or swap it for another build. Options come
from the environment, and stay in force until others are given:

    SYSTEM_TORCH=1     use the torch of this Python; 0: never; unset: if it is new enough and sees a GPU
    TORCH_INDEX=URL    the package index to install torch from

`setup_venv.py next` makes `.venv-next`: the same torch with the newest triton that there is, and what its tests need.
It stays as it was made; remove it to get a newer triton.

A stamp in `.venv` makes every call after the first return at once. Standard library only, since nothing else is there
yet; the syntax is kept old enough that an old Python reaches the message which says that it is too old.
"""

import hashlib
import importlib.util
import json
import os
import re
import site
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEXT = sys.argv[1:] == ["next"]
VENV = ROOT / (".venv-next" if NEXT else ".venv")
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "blockscale-setup.json"
# The Makefile reads it, so that a Python that was named once need not be named again.
MADE_BY = VENV / "made-by"

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
EXTRAS = ["cli"] if NEXT else ["cli", "plot", "train", "transformers", "dev"]
# torchtitan asks for it, imports it only for its own logs, and finding a version that fits takes pip minutes.
NOT_NEEDED = {"wandb"}
# Beside the extras: what the tests of compiled and interpreted kernels import.
NEXT_PACKAGES = ["numpy", "pytest", "pytest-xdist"]
STACK = {"torch", "triton", "numpy"}


class SetupError(Exception):
    """Set-up cannot go on; the message says why and what to do."""


def main():
    """Bring `.venv` up to date."""
    if sys.version_info < OLDEST_PYTHON:
        raise SetupError(
            f"Blockscale needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}.\n"
            "Fix: name a newer one, for example `make setup PYTHON=python3.12`."
        )
    leave_venv()
    stamp = read_stamp()
    last = stamp.get("options") or (read_stamp(ROOT / ".venv").get("options", {}) if NEXT else {})
    options = {name: os.environ.get(name) or last.get(name, "") for name in ("SYSTEM_TORCH", "TORCH_INDEX")}
    if options["SYSTEM_TORCH"] not in ("", "0", "1"):
        raise SetupError(f"SYSTEM_TORCH is {options['SYSTEM_TORCH']!r}.\nFix: use 1 (this Python's torch) or 0.")
    wanted = fingerprint(options)
    if stamp.get("installed") == wanted:
        print(f"{VENV.name} is up to date: {stamp['summary']}")
        return

    start = time.monotonic()
    print(f"Setting up {VENV.name} with Python {sys.version.split()[0]}")
    borrowed = find_system_torch(options["SYSTEM_TORCH"])
    base = {"python": sys.executable, "version": sys.version, "root": str(ROOT), "borrowed": borrowed}
    if stamp.get("base") != base:
        create_venv(borrow=borrowed is not None)
        write_stamp(base=base)
        MADE_BY.write_text(sys.executable + "\n")
    if borrowed:
        install_beside()
    else:
        install_all(options["TORCH_INDEX"])
    summary = check_torch(borrowed)
    write_stamp(base=base, options=options, installed=wanted, summary=summary)
    print(f"Ready after {time.monotonic() - start:.0f} s: {summary}")


def leave_venv():
    """Start again with the Python that made `.venv`, if `.venv` itself is running this: it may have to be replaced."""
    if Path(sys.prefix).resolve() == VENV.resolve():
        maker = read_stamp().get("base", {}).get("python", sys._base_executable)
        os.execv(maker, [maker, *sys.argv])


def read_stamp(venv=VENV):
    """What the last set-up left: `base` once `.venv` exists, the rest once it is complete."""
    try:
        return json.loads((venv / STAMP.name).read_text()) if (venv / "bin" / "python").exists() else {}
    except (OSError, ValueError):
        return {}


def write_stamp(**content):
    """Record how far the set-up has come."""
    STAMP.write_text(json.dumps(content, indent=1))


def fingerprint(options):
    """A digest of everything that set-up depends on and that is known without importing torch."""
    project = read_project()
    seen = [project["project"], project["build-system"], (ROOT / "constraints.txt").read_text()]
    seen += [Path(__file__).read_text(), str(ROOT), sys.executable, sys.version, find_version("torch"), options]
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()


def read_project():
    """The content of pyproject.toml."""
    # Imported here, because an older Python has no such module and must reach main().
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def find_version(package):
    """The version of a package that the running Python has, or None."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_system_torch(option):
    """The version of this Python's torch if `.venv` is to borrow it, else None."""
    fix = "Fix: install torch 2.11 or newer there, name another Python (PYTHON=...), or leave SYSTEM_TORCH out."
    if option == "0":
        return None
    if importlib.util.find_spec("torch") is None:
        if option:
            raise SetupError(f"SYSTEM_TORCH=1, but {sys.executable} has no torch.\n{fix}")
        return None

    torch = ask_torch(sys.executable)
    if "error" in torch:
        if option:
            raise SetupError(f"SYSTEM_TORCH=1, but torch cannot be imported:\n{torch['error']}\n{fix}")
        return None
    where = f"torch {torch['version']} of {sys.executable}"
    if tuple(map(int, re.findall(r"\d+", torch["version"])[:2])) < OLDEST_TORCH:
        if option:
            raise SetupError(f"SYSTEM_TORCH=1, but {where} is too old: 2.11 is needed.\n{fix}")
        print(f"  {where} is too old (2.11 is needed): installing another in .venv")
        return None
    if not option and not torch["gpu"]:
        return None
    reason = "SYSTEM_TORCH=1 says so" if option else "it sees a GPU (SYSTEM_TORCH=0 installs another)"
    print(f"  using {where}: {reason}")
    return torch["version"]


def ask_torch(python):
    """Import torch in a child process; returns its `version`, `cuda`, `gpu`, or the `error` that it raised."""
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
    # A borrowed environment has pip too, and some have it without the means to install another.
    with_pip = not (borrow and importlib.util.find_spec("pip"))
    if importlib.util.find_spec("venv") is None or (with_pip and importlib.util.find_spec("ensurepip") is None):
        raise SetupError(
            f"{sys.executable} cannot make virtual environments: its `venv` or `ensurepip` module is missing.\n"
            f"Fix: install it (Debian, Ubuntu: `apt install python3.{sys.version_info[1]}-venv`), "
            "or name another Python (PYTHON=...)."
        )
    import venv

    nested = sys.prefix != sys.base_prefix
    venv.create(VENV, system_site_packages=borrow and not nested, clear=True, symlinks=True, with_pip=with_pip)
    if borrow and nested:
        # This Python is itself a virtual environment, and the new one would look past it to the Python below.
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
        add_path_file("borrowed", "".join(lines))


def add_path_file(name, lines):
    """Put a .pth file, whose lines Python follows when it starts, into `.venv`."""
    folder = sysconfig.get_path("purelib", "venv", {"base": str(VENV)})
    Path(folder, f"{name}.pth").write_text(lines)


def install_all(torch_index):
    """Install torch, then everything else around it."""
    pins = read_pins()
    source = ["--index-url", torch_index] if torch_index else []
    if "torch" not in list_packages():
        announce_torch([*source, pins["torch"]])
    try:
        pip(f"install {pins['torch']}", *source, pins["torch"])
        packages = list_packages()
        extras = EXTRAS
        if "triton" in packages and any(line.startswith("triton") for line in packages["torch"]):
            del pins["triton"]
            if NEXT:
                print("  this build of torch brings its own triton: there is no newer one to test with it")
        else:
            extras = ["triton", *EXTRAS]
            if NEXT:
                del pins["triton"]
        pip("install Blockscale and its tools", *editable(extras, pins), *(NEXT_PACKAGES if NEXT else []))
        if not NEXT:
            install_torchtitan(pins)
    except PipError as error:
        raise SetupError(
            f"{error.output}\n\npip failed to {error.task}; what it said is above.\n"
            "Fix: check the network and run the command again. If torch could not be had: take it from another index\n"
            "(TORCH_INDEX=URL), use one that is installed already (SYSTEM_TORCH=1), or, if there is none for Python\n"
            f"{sys.version_info[0]}.{sys.version_info[1]}, name another Python (PYTHON=python3.12)."
        ) from None


def install_torchtitan(pins):
    """Install torchtitan, the extra `titan`, without what its tests do not need."""
    pip("install torchtitan", "--no-deps", pins["torchtitan"])
    lines = [line.split(";") for line in list_packages()["torchtitan"]]
    needed = [line[0].strip() for line in lines if len(line) == 1 and package_name(line[0]) not in NOT_NEEDED]
    pip("install what torchtitan needs", "--constraint", str(VENV / "constraints.txt"), *needed)


def install_beside():
    """Install everything but torch, or as much as the machine has already if no package can be fetched."""
    pins = {name: pin for name, pin in read_pins().items() if name not in STACK}
    try:
        # Most machines that bring their own torch have no network at all: find out soon.
        pip("install Blockscale and its tools", "--retries", "1", "--timeout", "15", *editable(EXTRAS, pins))
    except PipError as error:
        reasons = re.findall("ERROR: (.*)", error.output) or ["it did not say why"]
        print(f"  pip: {reasons[-1]}")
        print("  continuing with the packages of this machine; to try again, remove .venv")
        add_path_file("blockscale", f"{ROOT / 'src'}\n")
        missing = sorted(wanted_packages() - set(list_packages()))
        print(f"  not here: {', '.join(missing) or 'nothing'}" + (" (what needs them will say so)" if missing else ""))


def announce_torch(arguments):
    """Say which build of torch is about to be fetched, and, if it is the large one, how to avoid it."""
    dry_run = [str(PYTHON), "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", *arguments]
    child = subprocess.run(dry_run, capture_output=True, text=True)
    try:
        names = [package["metadata"]["name"].lower() for package in json.loads(child.stdout)["install"]]
    except (ValueError, KeyError):
        # The installation itself will fail for the same reason, and show it.
        return
    if any(name.startswith(("nvidia-", "cuda-")) for name in names):
        print("  torch comes as its CUDA build: about 3 GB to fetch, which takes a while. If that is too much, set")
        print("  TORCH_INDEX=<URL of an index with CPU builds>, or SYSTEM_TORCH=1 to use a torch that is installed")
    else:
        print("  torch comes as its CPU build, without CUDA packages")


class PipError(Exception):
    """pip failed at a task; `output` is all that it said."""

    def __init__(self, task, output):
        """Keep the task and the output for the error message."""
        super().__init__(task)
        self.task, self.output = task, output


def pip(task, *arguments):
    """Run `pip install` quietly in `.venv`, showing the task and how long it has been going on."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", *arguments]
    start = time.monotonic()
    print(f"  {task} ... ", end="", flush=True)
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    while True:
        try:
            output, _ = child.communicate(timeout=1)
            break
        except subprocess.TimeoutExpired:
            if sys.stdout.isatty():
                print(f"\r  {task} ... {time.monotonic() - start:.0f} s", end="", flush=True)
    restart = f"\r  {task} ... " if sys.stdout.isatty() else ""
    print(f"{restart}{time.monotonic() - start:.0f} s" + (", failed" if child.returncode else ""))
    if child.returncode:
        raise PipError(task, output.strip())


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


def list_packages():
    """The packages that `.venv` sees, each with its requirements."""
    code = (
        "import json\n"
        "from importlib.metadata import distributions\n"
        "print(json.dumps([[found.metadata['Name'], found.requires or []] for found in distributions()]))"
    )
    child = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=True)
    return {package_name(name): requires for name, requires in json.loads(child.stdout) if name}


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
