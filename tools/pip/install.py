"""Install the pins of a hash-locked file, one folder per distribution, and describe them as a BUILD file.

    python install.py OUT [--choose DISTRIBUTION] LOCK [LOCK ...]

Several locks are alternatives, best first: --choose names the distribution whose wheel decides. A lock counts as
usable when pip finds a wheel of that distribution with one of the lock's hashes; the last lock is not asked.

Everything is fetched as wheels with --require-hashes: a wheel that differs from its lock stops the installation.
"""

import argparse
import email.parser
import os
import pathlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable

# pip carries the reference implementation of requirement markers and names; a bare environment has no other.
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

# torch finds the CUDA libraries by paths relative to its own folder, so they are unpacked into that folder.
HOUSEMATES = {"torch": re.compile(r"(nvidia|cuda)_")}

# torch wants Triton only to compile for a GPU. What needs Triton names it; what does not must not see it.
UNUSED_EDGES = {("torch", "triton")}

# Folders with C++ headers, offered as cc_library.
HEADERS = {"pybind11": "pybind11/include"}


class InstallError(Exception):
    """A message for the user."""


def target(name: str) -> str:
    """Target name of a distribution: 'bazel-runfiles' and 'Bazel.Runfiles' are both 'bazel_runfiles'."""
    return canonicalize_name(name).replace("-", "_")


def read_pins(lock: pathlib.Path) -> dict[str, str]:
    """Pins of a lock by target name, each as pip wants it: 'name===version --hash=… --hash=…'.

    Three equals signs: for pip, version 1.0+cpu satisfies 'name==1.0', and may win over the wheel that was locked.
    """
    lines = [line for line in lock.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    pins = {}
    for pin in re.split(r"(?<!\\)\n", "\n".join(lines)):
        pin = " ".join(pin.replace("\\\n", " ").split())
        name, rest = pin.split("==", 1)
        pins[target(name)] = f"{name}==={rest}"
    return pins


def say(text: str) -> None:
    print(f"fla: {text}", file=sys.stderr, flush=True)


def download(pins: dict[str, str], wheels: pathlib.Path, title: str | None) -> str | None:
    """Fetch the wheels of `pins` into `wheels`. Returns None, or what pip said when it failed."""
    wheels.mkdir(parents=True, exist_ok=True)
    requirements = wheels / "requirements.txt"
    requirements.write_text("\n".join(pins.values()) + "\n")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    command += ["--require-hashes", "--only-binary", ":all:", "--progress-bar", "off"]
    command += ["--dest", str(wheels), "--requirement", str(requirements)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, started = [], 0
    for line in process.stdout:
        output.append(line)
        if title and line.startswith(("Collecting ", "Processing ")):  # the latter for a wheel on this machine
            started += 1
            say(f"{title}: fetching {started}/{len(pins)} {pathlib.Path(line.split()[1]).name.replace('===', ' ')}")
    requirements.unlink()
    return "".join(output) if process.wait() else None


def explain_failure(lock: pathlib.Path, output: str) -> str:
    """One sentence on top of pip's words."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    missing = re.search(r"No matching distribution found for (\S+)", output)
    if missing:
        return (
            f"pip finds no wheel of {missing[1]} for Python {python}, which {lock.name} pins: check that pip reaches "
            f"its package index; choose another Python (FLA_PYTHON=python3.11) or another torch "
            f"(--repo_env=FLA_TORCH=cpu or cuda).\n{output}"
        )
    if "DO NOT MATCH THE HASHES" in output:
        return f"a wheel differs from its hash in {lock.name}, nothing was installed.\n{output}"
    return f"pip could not fetch what {lock.name} pins.\n{output}"


def choose(locks: list[pathlib.Path], distribution: str | None, wheels: pathlib.Path) -> pathlib.Path:
    """The first lock whose wheel of `distribution` pip finds; the last lock when no other has one."""
    for lock in locks[:-1]:
        pin = read_pins(lock)[distribution]
        say(f"{lock.stem}: is there a wheel of {pin.split()[0]}?")
        if download({distribution: pin}, wheels, None) is None:
            return lock
        say(f"{lock.stem}: no, so {locks[-1].stem} (a larger download)")
    return locks[-1]


def unpack(wheel: pathlib.Path, site: pathlib.Path) -> list[str]:
    """Unpack a wheel into a site-packages folder. Returns its Requires-Dist lines."""
    site.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        for info in archive.infolist():  # zipfile drops the execute bit, which ptxas and its like need
            if not info.is_dir() and info.external_attr >> 16 & 0o111:
                (site / info.filename).chmod(0o755)
        metadata = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        requires = email.parser.BytesHeaderParser().parse(archive.open(metadata)).get_all("Requires-Dist") or []
    name, version = wheel.name.split("-")[:2]
    for scheme in ("purelib", "platlib"):
        merge(site / f"{name}-{version}.data" / scheme, site)
    return requires


def merge(source: pathlib.Path, destination: pathlib.Path) -> None:
    """Move what is in `source`, folder by folder, into `destination`."""
    for item in source.glob("*"):
        if item.is_dir() and (destination / item.name).is_dir():
            merge(item, destination / item.name)
        else:
            item.rename(destination / item.name)


def dependencies(requires: Iterable[str], installed: Iterable[str]) -> set[str]:
    """Target names of the installed distributions that `requires` asks for on this host, extras left out."""
    parsed = [Requirement(text) for text in requires]
    wanted = {target(r.name) for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})}
    return wanted & set(installed)


def build_file(graph: dict[str, set[str]], headers: Iterable[str]) -> str:
    """BUILD text: a py_library per distribution, and a cc_library for each folder of headers."""
    lines = [
        'load("@rules_cc//cc:defs.bzl", "cc_library")',
        'load("@rules_python//python:defs.bzl", "py_library")',
        "",
        'package(default_visibility = ["//visibility:public"])',
    ]
    for name, needs in sorted(graph.items()):
        deps = ", ".join(f'":{need}"' for need in sorted(needs))
        site = f'"{name}/site"'
        lines += ["", f'py_library(name = "{name}", data = [{site}], imports = [{site}], deps = [{deps}])']
    for name in headers:
        folder = f"{name}/site/{HEADERS[name]}"
        rule = f'cc_library(name = "{name}_headers", hdrs = glob(["{folder}/**"]), includes = ["{folder}"])'
        lines += ["", rule]
    return "\n".join(lines) + "\n"


def install(locks: list[pathlib.Path], out: pathlib.Path, distribution: str | None = None) -> None:
    wheels = out / "wheels"
    lock = choose(locks, distribution, wheels)
    pins = read_pins(lock)
    failure = download(pins, wheels, lock.stem)
    if failure is not None:
        raise InstallError(explain_failure(lock, failure))

    houses = {name: next((h for h, mates in HOUSEMATES.items() if mates.match(name)), name) for name in pins}
    requires = {name: [] for name in houses.values()}
    for wheel in sorted(wheels.glob("*.whl")):
        name = target(wheel.name.split("-")[0])
        if name not in pins:
            continue  # fetched to choose between locks
        megabytes = wheel.stat().st_size >> 20
        if megabytes > 20:
            say(f"{lock.stem}: unpacking {name} ({megabytes} MB)")
        requires[houses[name]] += unpack(wheel, out / houses[name] / "site")
        wheel.unlink()
    wheels.rmdir()

    say(f"{lock.stem}: compiling")
    # .pyc files that never look at time stamps: tests run in a read-only sandbox and cannot write their own.
    compileall = [sys.executable, "-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash"]
    subprocess.run([*compileall, str(out)], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    graph = {}
    for name, lines in requires.items():
        needs = dependencies(lines, requires) - {name}
        graph[name] = {need for need in needs if (name, need) not in UNUSED_EDGES}
    headers = [name for name, folder in HEADERS.items() if (out / name / "site" / folder).is_dir()]
    (out / "BUILD.bazel").write_text(build_file(graph, headers))
    say(f"{lock.stem}: ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("locks", type=pathlib.Path, nargs="+", metavar="LOCK")
    parser.add_argument("--choose", metavar="DISTRIBUTION")
    options = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    try:
        install(options.locks, options.out, options.choose)
    except InstallError as error:
        sys.exit(f"fla: {error}")


if __name__ == "__main__":
    main()
