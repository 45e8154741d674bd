"""The directory of the simulator's libraries, and their compilation for the installed torch_npu."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from anytron_ascend_simulator.signatures import SIGNATURES

SUPPORTED = ("2.13.0",)
"""Versions of torch_npu whose headers and undefined symbols the sources here were written against."""

SOURCES = Path(__file__).parent / "csrc"

LIBRARIES = (
    "ascendcl",
    "hccl",
    "acl_op_compiler",
    "ge_runner",
    "graph",
    "acl_tdt_channel",
    "fmk_parser",
    "ascend_protobuf",
    "opapi",
)
"""Libraries that torch_npu links against or opens, in the order in which they must be loaded."""


class SimulatorError(RuntimeError):
    """The simulator cannot be built or used; the text says why and what to do."""


def torch_npu_version() -> str:
    """The installed torch_npu's version.

    Raises:
        SimulatorError: torch_npu is not installed, or the simulator does not support its version.
    """
    try:
        found = version("torch-npu")
    except PackageNotFoundError:
        raise SimulatorError(
            f"The simulator runs the real torch_npu, which is not installed: pip install torch-npu=={SUPPORTED[-1]}"
        ) from None
    if found not in SUPPORTED:
        raise SimulatorError(
            f"The simulator supports torch_npu {', '.join(SUPPORTED)} only, because other versions have other headers "
            f"and symbols, but torch_npu {found} is installed: pip install torch-npu=={SUPPORTED[-1]}"
        )
    return found


def package_directory(name: str) -> Path:
    """Find an installed package's directory without importing it."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SimulatorError(f"The package {name} is not installed: pip install {name.replace('_', '-')}")
    return Path(spec.origin).parent


def library_directory() -> Path:
    """The directory of the libraries for the installed torch_npu and these sources; it may not exist yet.

    It is in ``ANYTRON_ASCEND_SIMULATOR_DIR``, by default in the user's cache; its name contains torch_npu's version
    and a hash of the sources, so that stale libraries are never used.
    """
    digest = hashlib.sha256(torch_npu_version().encode())
    here = Path(__file__)
    for source in sorted([*SOURCES.iterdir(), *(here.with_name(f"{name}.py") for name in ("build", "signatures"))]):
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = os.environ.get("ANYTRON_ASCEND_SIMULATOR_DIR") or cache / "anytron" / "ascend-simulator"
    return Path(root) / f"torch_npu-{torch_npu_version()}-{digest.hexdigest()[:12]}"


def library_paths() -> list[Path]:
    """Return the paths of the libraries, in the order in which they are loaded."""
    return [library_directory() / f"lib{name}.so" for name in LIBRARIES]


_RUNTIME_PREFIXES = ("acl", "rt", "Hccl", "Msprof")
"""Beginnings of the names of CANN's C functions."""


def build() -> Path:
    """Build the libraries, if they are not there already; return their directory.

    Raises:
        SimulatorError: torch_npu, the compiler or binutils is missing, torch_npu is of an unknown version, or
            a compilation fails.
    """
    torch_npu_version()
    target = library_directory()
    if all((target / f"lib{name}.so").is_file() for name in LIBRARIES):
        return target
    for tool in ("g++", "nm"):
        if shutil.which(tool) is None:
            raise SimulatorError(
                f"Building the simulator needs {tool}: install it, for example apt install g++ binutils"
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    # In one rename, so that two builds at the same time do not see each other's halves.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as temporary:
        _Build(Path(temporary), package_directory("torch_npu"), package_directory("torch")).run()
        try:
            Path(temporary).rename(target)
        except OSError:
            if not target.is_dir():
                raise
        else:
            Path(temporary).mkdir()  # TemporaryDirectory removes it
    return target


class _Build:
    def __init__(self, target: Path, torch_npu: Path, torch: Path) -> None:
        self._target = target
        self._torch_npu = torch_npu
        self._torch = torch

    def run(self) -> None:
        runtime = [self._compile(SOURCES / name) for name in ("runtime.cpp", "streams.cpp")]
        refusals = self._source("refusals.cpp", self._runtime_refusals(runtime))
        self._link("ascendcl", *runtime, refusals)
        self._link("hccl", self._compile(SOURCES / "hccl.cpp"))
        for name in ("acl_op_compiler", "graph", "acl_tdt_channel", "fmk_parser", "ascend_protobuf"):
            self._link(name, self._source(f"{name}.S", _NO_EXECUTABLE_STACK))
        self._link("opapi", self._compile(SOURCES / "opapi.cpp"), self._source("thunks.S", _thunks()))
        self._link("ge_runner", self._source("graph_refusals.S", self._graph_refusals()))

    def _runtime_refusals(self, runtime: list[Path]) -> str:
        """Write C functions that return an error, for those that torch_npu links against and the simulator lacks."""
        libraries = [*self._torch_npu.glob("_C*.so"), *(self._torch_npu / "lib").glob("*.so")]
        wanted = {name for name in _symbols("--undefined-only", libraries) if name.startswith(_RUNTIME_PREFIXES)}
        missing = sorted(wanted - _symbols("--defined-only", runtime, dynamic=False))
        # 207000: ACL_ERROR_RT_FEATURE_NOT_SUPPORT.
        functions = "".join(f"int {name}() {{ return 207000; }}\n" for name in missing)
        return f'extern "C" {{\n{functions}}}\n'

    def _graph_refusals(self) -> str:
        """Define the graph compiler's C++ symbols, so that torch_npu's torch.compile backend loads; none is called."""
        backend = sorted((self._torch_npu / "dynamo" / "torchair" / "core").glob("*.so"))
        # Names alone: versioned symbols (memcpy@GLIBC) are the system's.
        wanted = {name for name in _symbols("--undefined-only", backend) if "@" not in name}
        lib = [*(self._torch / "lib").glob("*.so*"), *(self._torch_npu / "lib").glob("*.so")]
        known = {
            name.partition("@")[0] for name in _symbols("--defined-only", [*backend, *lib, *self._target.glob("*.so")])
        }
        # C++ names of ge:: and of protobuf, and the bounded C functions of CANN's libc_sec; anything else is torch's,
        # Python's or the C++ runtime's.
        missing = sorted(name for name in wanted - known if name.startswith(("_Z", "acl")) or name.endswith("_s"))
        labels = "".join(f".globl {name}\n.type {name},@function\n{name}:\n" for name in missing)
        return f".text\n{labels}xorl %eax, %eax\nret\n{_NO_EXECUTABLE_STACK}"

    def _source(self, name: str, text: str) -> Path:
        path = self._target / name
        path.write_text(text, encoding="ascii")
        return path

    def _compile(self, source: Path) -> Path:
        output = self._target / f"{source.stem}.o"
        warnings = ("-Wall", "-Wextra", "-Wno-deprecated-declarations", "-Wno-unused-parameter")
        flags = ("-O2", "-std=c++17", "-fPIC", *warnings, f"-isystem{self._torch_npu / 'include'}")
        _run("g++", *flags, "-c", str(source), "-o", str(output))
        return output

    def _link(self, name: str, *parts: Path) -> None:
        dependency = () if name in ("ascendcl", "opapi") else (f"-L{self._target}", "-Wl,--no-as-needed", "-lascendcl")
        library = self._target / f"lib{name}.so"
        _run(
            "g++", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", *map(str, parts), *dependency, "-o", str(library)
        )


_NO_EXECUTABLE_STACK = '.section .note.GNU-stack,"",@progbits\n'


def _thunks() -> str:
    """Write, for each entry point, a jump through a pointer (slot) that Python sets (x86-64)."""
    machine = platform.machine()
    if machine != "x86_64":
        raise SimulatorError(f"The simulator runs on x86_64 only, but this machine is {machine}: use another machine.")
    names = [name + suffix for name in SIGNATURES for suffix in ("GetWorkspaceSize", "")]
    return "".join(map(_thunk, names)) + _NO_EXECUTABLE_STACK


def _thunk(name: str) -> str:
    return (
        f".text\n.globl {name}\n.type {name},@function\n"
        f"{name}:\nmovq slot_{name}@GOTPCREL(%rip), %r11\njmp *(%r11)\n"
        f".data\n.globl slot_{name}\nslot_{name}: .quad anytron_simulator_no_kernel\n"
    )


def _symbols(which: str, files: list[Path], *, dynamic: bool = True) -> set[str]:
    flags = ("-D", which) if dynamic else (which,)
    output = _run("nm", *flags, "--format=posix", *map(str, files))
    # Lines of one file name (ending in a colon) stand between lines of `name type ...`.
    return {line.split()[0] for line in output.splitlines() if len(line.split()) > 1}


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise SimulatorError(f"{' '.join(command)}\nfailed:\n{done.stderr}")
    return done.stdout
