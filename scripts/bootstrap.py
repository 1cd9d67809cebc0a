"""Makes .venv whole: the one program behind `make test` and `make demo` on a fresh machine.

    absent ──> begun (UNFINISHED stands in it) ──> whole (STAMP says what it was made from)

Only an environment with the stamp and without the mark is taken for whole. pip may stop between the files
of a package and takes that package for installed ever after, so what was begun and not finished is removed
and made anew; pip's own cache keeps that from fetching anything twice. An environment that somebody else
made, with neither mark nor stamp, is kept and completed.

Standard library only, and no syntax newer than Python 3.6: an old Python must get as far as saying it is old.
"""

import argparse
import errno
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from typing import Any, Dict, List, Optional, Set, Tuple

PIN = "torch==2.13.0"
OLDEST = (3, 11)
UNFINISHED = ".agentkv-unfinished"
STAMP = ".agentkv-stamp.json"
# For Python 3.11 on Linux, rounded up: what is downloaded, and the room for .venv, caches and model.
TORCH_MB, REST_MB, MODEL_MB = 200, 125, 95
ROOM_MB, ROOM_MB_WITH_TORCH = 2500, 1500

NO_ROOM = r"No space left on device|Errno 28\b|Disk quota exceeded"
NO_NETWORK = (
    r"name resolution|Name or service not known|nodename nor servname|NewConnectionError|NameResolutionError"
    r"|Failed to establish a new connection|Network is unreachable|No route to host|Connection refused"
    r"|Connection reset|ConnectTimeout|Read timed out|ProxyError|Cannot connect to proxy|Max retries exceeded"
    r"|SSLError|Remote end closed connection"
)


class Stop(Exception):
    """Ends the program; the message is the one line that the user reads."""


class Machine:
    """All that this program asks of the computer. Tests put their own answers in its place."""

    version: Tuple[int, ...] = tuple(sys.version_info[:3])
    python = sys.executable
    goal = "test"
    """What make was asked for, so that what is to be typed next can be said in full."""
    silence = 15.0
    """Seconds after which a log is told that a program is still at it."""

    def has_module(self, name: str) -> bool:
        return importlib.util.find_spec(name) is not None

    def free_mb(self, folder: str) -> int:
        return shutil.disk_usage(folder).free // 2**20

    def run(self, argv: List[str]) -> Tuple[int, str]:
        """Exit code and stderr. A terminal sees pip's progress bars; a log gets a line every `silence` seconds."""
        shown = None if sys.stdout.isatty() else subprocess.DEVNULL
        with subprocess.Popen(argv, stdout=shown, stderr=subprocess.PIPE, universal_newlines=True) as process:
            seconds = 0.0
            while True:
                try:
                    said = process.communicate(timeout=None if shown is None else self.silence)[1]
                    return process.returncode, said
                except subprocess.TimeoutExpired:
                    seconds += self.silence
                    self.still_running(argv, seconds)
                except BaseException:
                    process.kill()
                    raise

    def still_running(self, argv: List[str], seconds: float) -> None:
        what = "pip install " + argv[-1] if "pip" in argv else os.path.basename(argv[0])
        print("  ... {:.0f} s: {} is still running".format(seconds, what), flush=True)

    def torch_version(self) -> str:
        """Empty where this Python has no torch. Asks the metadata, which costs a few milliseconds."""
        from importlib import metadata

        try:
            return metadata.version("torch")
        except metadata.PackageNotFoundError:
            return ""

    def lend_torch(self, site_packages: str) -> None:
        link_torch(site_packages)


def main(argv: List[str], machine: Optional[Machine] = None) -> int:
    parser = argparse.ArgumentParser(description="Make .venv whole.")
    parser.add_argument("--root", default=os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    parser.add_argument(
        "--torch",
        default=os.environ.get("TORCH", ""),
        help="what pip installs as torch (default: " + PIN + ")",
    )
    parser.add_argument(
        "--python-chosen",
        action="store_true",
        help="the user named this Python: an environment of another one is made anew",
    )
    parser.add_argument("--goal", default="test", help="what make makes, for its name in what is said")
    options = parser.parse_args(argv)
    if os.path.realpath(sys.prefix) == os.path.realpath(os.path.join(options.root, ".venv")):
        # PYTHON is the very environment to be made, which somebody activated: the Python beneath makes it.
        beneath = str(getattr(sys, "_base_executable", sys.executable))
        os.execv(beneath, [beneath, os.path.abspath(__file__), *argv])
    machine = machine or Machine()
    machine.goal = options.goal or "test"
    try:
        bring_up(machine, options.root, options.torch.strip(), options.python_chosen)
    except Stop as stop:
        return say_and_fail(str(stop), 1)
    except KeyboardInterrupt:
        return say_and_fail("stopped. What was begun is made anew by the next make.", 130)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return say_and_fail(no_room(ROOM_MB), 1)
        return say_and_fail("{}. Mend that, then run make again.".format(error), 1)
    return 0


def say_and_fail(line: str, code: int) -> int:
    print("agentkv: " + line, file=sys.stderr)
    return code


# -----------------------------------------------------------------------------------------------------------
# What is there, and what is to be done.


def bring_up(machine: Machine, root: str, torch: str, python_chosen: bool) -> None:
    """`torch` is the user's wish, or empty: then a whole environment stays with the torch it has."""
    venv = os.path.join(root, ".venv")
    wanted = {
        "python": "{}.{} of {}".format(machine.version[0], machine.version[1], sys.base_prefix),
        "torch": torch,
        "pyproject": digest_of(os.path.join(root, "pyproject.toml")),
    }
    stamp = read_stamp(venv)
    if stamp is None:
        make_whole(machine, root, venv, wanted)
    elif (python_chosen and stamp["python"] != wanted["python"]) or torch not in ("", stamp["torch"]):
        shutil.rmtree(venv)
        make_whole(machine, root, venv, wanted)
    elif stamp["pyproject"] != wanted["pyproject"]:
        print("agentkv: pyproject.toml has changed: bringing .venv up to date, usually a few MB and seconds")
        mark_begun(venv)
        install(machine, venv, ["-e", root + "[dev]"], "what pyproject.toml names")
        stamp["pyproject"] = wanted["pyproject"]
        write_stamp(venv, stamp)


def make_whole(machine: Machine, root: str, venv: str, wanted: Dict[str, str]) -> None:
    check_python(machine)
    if os.path.exists(os.path.join(venv, UNFINISHED)):
        shutil.rmtree(venv)
    fresh = not os.path.exists(venv_python(venv))
    torch = wanted["torch"] or PIN
    lent = torch_to_lend(machine, root, wanted["torch"]) if fresh else ""
    room_mb = ROOM_MB_WITH_TORCH if lent else ROOM_MB
    if machine.free_mb(root) < room_mb:
        raise Stop(no_room(room_mb))
    announce(machine, torch, lent)
    mark_begun(venv)  # Before anything else, so that at no moment half of it looks whole.
    if fresh:
        code, said = machine.run([machine.python, "-m", "venv", venv])
        if code:
            raise Stop(no_room(room_mb) if re.search(NO_ROOM, said) else no_venv(machine))
    if lent:
        machine.lend_torch(site_packages_of(machine, venv))
    else:
        # torch comes first: the range in pyproject.toml alone would take the newest, on Linux a CUDA build.
        install(machine, venv, shlex.split(torch), torch)
    install(machine, venv, ["-e", root + "[dev]"], "what pyproject.toml names")
    code, said = machine.run([venv_python(venv), "-c", "import torch, transformers, agentkv"])
    if code:
        why = (said.strip().splitlines() or ["no word of why"])[-1]
        raise Stop("what was installed does not import ({}). Try: make {} TORCH='{}'".format(why, machine.goal, PIN))
    write_stamp(venv, wanted)


def torch_to_lend(machine: Machine, root: str, wish: str) -> str:
    """The version of the torch that PYTHON has, where it fits and works; otherwise empty."""
    version = machine.torch_version()
    if not version or not fits(version, wish, os.path.join(root, "pyproject.toml")):
        return ""
    return version if machine.run([machine.python, "-c", "import torch"])[0] == 0 else ""


def digest_of(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def read_stamp(venv: str) -> Optional[Dict[str, str]]:
    """What a whole environment was made from; None for one that is absent, begun, or somebody else's."""
    if os.path.exists(os.path.join(venv, UNFINISHED)):
        return None
    try:
        with open(os.path.join(venv, STAMP), encoding="utf-8") as file:
            stamp = json.load(file)
        return {name: str(stamp[name]) for name in ("python", "torch", "pyproject")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_stamp(venv: str, stamp: Dict[str, str]) -> None:
    with open(os.path.join(venv, STAMP), "w", encoding="utf-8") as file:
        json.dump(stamp, file, indent=1)
    os.remove(os.path.join(venv, UNFINISHED))


def mark_begun(venv: str) -> None:
    os.makedirs(venv, exist_ok=True)
    with open(os.path.join(venv, UNFINISHED), "w", encoding="utf-8"):
        pass


def venv_python(venv: str) -> str:
    return os.path.join(venv, "bin", "python")


def site_packages_of(machine: Machine, venv: str) -> str:
    name = "python{}.{}".format(machine.version[0], machine.version[1])
    return os.path.join(venv, "lib", name, "site-packages")


# -----------------------------------------------------------------------------------------------------------
# What the user is told.


def announce(machine: Machine, torch: str, lent: str) -> None:
    print("agentkv: making .venv with Python {} ({})".format(dotted(machine.version), machine.python))
    if lent:
        print("  torch       {}: this Python has it already, nothing to download".format(lent))
    else:
        print("  torch       {}: about {} MB as a CPU build. On Linux some package".format(torch, TORCH_MB))
        print("              indexes answer with a CUDA build of several GB; to choose another, stop this")
        print("              (Ctrl-C) and name it, for instance: make {} TORCH='{}+cpu'".format(machine.goal, PIN))
    print("  the rest    about {} MB: transformers, and the tools that make test needs".format(REST_MB))
    print("  a model     about {} MB, fetched at its first use, kept in your cache folder".format(MODEL_MB))
    total = REST_MB + MODEL_MB + (0 if lent else TORCH_MB)
    print("  in all      about {} MB and 2 to 6 minutes, once".format(total), flush=True)


def dotted(version: Tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def no_room(wanted_mb: int) -> str:
    return "no room on the disk: about {:,} MB are needed. Make room, then run make again.".format(wanted_mb)


def no_venv(machine: Machine) -> str:
    return (
        "{} has no working venv module. Install it (Debian, Ubuntu: apt install python{}-venv), or choose "
        "another Python: make {} PYTHON=/path/to/python3".format(
            machine.python, dotted(machine.version[:2]), machine.goal
        )
    )


def check_python(machine: Machine) -> None:
    if machine.version < OLDEST:
        raise Stop(
            "Python {} or newer is needed, and {} is {}. Install one, or choose one that is there: "
            "make {} PYTHON=python3.12".format(dotted(OLDEST), machine.python, dotted(machine.version), machine.goal)
        )
    if not (machine.has_module("venv") and machine.has_module("ensurepip")):
        raise Stop(no_venv(machine))


# -----------------------------------------------------------------------------------------------------------
# pip.


def install(machine: Machine, venv: str, wanted: List[str], what: str) -> None:
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    pip = [venv_python(venv), "-m", "pip", "--disable-pip-version-check", "--retries", "2", "install"]
    code, said = machine.run(pip + quiet + wanted)
    if code == 0:
        return
    if re.search(NO_ROOM, said):
        raise Stop(no_room(ROOM_MB))
    if re.search(NO_NETWORK, said):
        raise Stop(
            "no network: pip could not reach its package index for {}. Connect, or set pip's own PIP_PROXY, "
            "PIP_INDEX_URL or PIP_FIND_LINKS, then run make again.".format(what)
        )
    if re.search("No matching distribution found", said):
        raise Stop(
            "pip finds no build of {} for this Python. See that pip's index is the one you mean, or choose "
            "another Python or torch: make {} PYTHON=python3.11 TORCH=torch".format(what, machine.goal)
        )
    sys.stderr.write("".join(line + "\n" for line in said.strip().splitlines()[-15:]))
    raise Stop("pip could not install {}; its last words are above. Mend that, then run make again.".format(what))


# -----------------------------------------------------------------------------------------------------------
# A torch that is there already.


def fits(version: str, wish: str, pyproject: str) -> bool:
    """A torch that is there may stand in: the very version wished for, or without a wish any in our range."""
    if wish:
        return wish in ("torch==" + version, "torch==" + version.split("+")[0])
    import tomllib

    with open(pyproject, "rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    ranges = (re.match(r"torch\s*([<>=].*)$", line) for line in dependencies)
    bounds = next(match.group(1) for match in ranges if match)
    return all(holds(version, bound.strip()) for bound in bounds.split(","))


def holds(version: str, bound: str) -> bool:
    match = re.match(r"(>=|<)\s*([\d.]+)$", bound)
    assert match, "torch's range in pyproject.toml is written with >= and < alone, not {!r}".format(bound)
    ours, theirs = release(version), release(match.group(2))
    return ours >= theirs if match.group(1) == ">=" else ours < theirs


def release(version: str) -> List[int]:
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else []
    return [*numbers, 0, 0, 0][:3]


def link_torch(site_packages: str) -> None:
    """Links PYTHON's torch, and the CUDA libraries and compilers that it requires, into an environment.

    Links, and not `--system-site-packages`: that would let in everything else that PYTHON has, pytest plugins
    and other versions of our dependencies among them, and would not see the torch of a PYTHON that is itself
    a virtual environment. Each part gets metadata of its own, so that pip finds the requirement met; its
    RECORD names the links, so that no pip ever removes what they point to.
    """
    for part in parts_of_torch():
        tops = top_level_names(part)
        for name in tops:
            link = os.path.join(site_packages, name)
            if not os.path.lexists(link):  # Several parts share the folder nvidia/.
                os.symlink(str(part.locate_file(name)), link)
        write_metadata(part, tops, site_packages)


def parts_of_torch() -> List[Any]:
    """torch, and what it requires that is built for one platform; pip fetches the rest, which is small."""
    from importlib import metadata

    parts: List[Any] = []
    seen: Set[str] = set()
    names = ["torch"]
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            part = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if name == "torch" or "-any" not in (part.read_text("WHEEL") or "-any"):
            parts.append(part)
        for line in part.requires or []:
            required = re.match(r"[\w.-]+", line)
            if required and not re.search(r"\bextra\b", line):
                names.append(re.sub(r"[-_.]+", "-", required.group()).lower())
    return parts


def top_level_names(part: Any) -> List[str]:
    files = [file.parts[0] for file in part.files or []]
    names = files or (part.read_text("top_level.txt") or part.metadata["Name"]).split()
    skipped = ("..", "/", "__pycache__")
    return sorted({name for name in names if name not in skipped and not name.endswith((".dist-info", ".egg-info"))})


def write_metadata(part: Any, tops: List[str], site_packages: str) -> None:
    stem = re.sub(r"[-_.]+", "_", part.metadata["Name"]) + "-" + part.version + ".dist-info"
    folder = os.path.join(site_packages, stem)
    os.makedirs(folder, exist_ok=True)
    texts = {
        "METADATA": part.read_text("METADATA") or part.read_text("PKG-INFO") or "",
        "INSTALLER": "agentkv-bootstrap\n",
    }
    texts["RECORD"] = "".join(name + ",,\n" for name in [*tops, *(stem + "/" + text for text in [*texts, "RECORD"])])
    for name, text in texts.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
