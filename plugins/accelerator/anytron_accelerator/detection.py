"""Find out, without importing torch or a device's package here, whether torch has an accelerator."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

GROUP = "torch.backends"
"""Entry points of the packages that add devices to torch."""
BUILT_FOR = {
    "cuda": ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap"),  # Linux, WSL, Jetson
    "hip": ("/dev/kfd", "/dev/dxg"),
    "xpu": ("/dev/dri",),
}
"""For each type of device: the variable of torch/version.py that is set if torch was built for it, and files of which
its driver makes at least one. Most people have a torch that was built for CUDA, also on machines without a GPU. There,
no process is started that imports torch, unless the user names this platform."""
OWN_BUILD = re.compile(r"(cpu|cu\d+|rocm[\d.]+|xpu)?")
"""Local part of the version of a torch that PyTorch has built. Vendors whose devices answer as CUDA have another one,
and their drivers make other files."""
LIMIT_S = 180.0
VARIABLE = "ANYTRON_ACCELERATOR"
"""Environment variable with the answer, for the processes that this one starts."""

_ANSWER = "anytron found: "
_QUESTION = f"""
import sys
sys.path[:] = [path for path in sys.path if path]  # no module of the current directory
import importlib.metadata, json, os, torch
failed = {{}}
for point in importlib.metadata.entry_points(group="{GROUP}"):
    if point.module.partition(".")[0] in sys.argv[1:]:
        try:
            point.load()()
        except Exception as error:
            failed[point.module.partition(".")[0]] = f"{{type(error).__name__}}: {{error}}"
kind, count, backend = "", 0, ""
if torch.accelerator.is_available():
    kind, count = torch.accelerator.current_accelerator().type, torch.accelerator.device_count()
    if torch.distributed.is_available():
        backend = torch.distributed.Backend.default_device_backend_map.get(kind, "")
        backend = backend if torch.distributed.is_backend_available(backend) else ""
print("\\n{_ANSWER}" + json.dumps([kind, count, backend, failed]), flush=True)
os._exit(0)  # a library may hang when the process ends
"""


@dataclass(frozen=True)
class Found:
    """The accelerator that torch reports.

    Attributes:
        devices: Number of devices; 0 = torch has no accelerator.
        reason: Description of the accelerator, or why there is none. No full stop.
        device_type: Its type in torch; empty if there is none.
        backend: Its backend of ``torch.distributed``; empty = it has none that is available.
        broken: Whether a package or a driver is there that does not work.
        expected: Whether torch or an installed package is made for a device.
    """

    devices: int
    reason: str
    device_type: str = ""
    backend: str = ""
    broken: bool = False
    expected: bool = True


def device_packages() -> tuple[str, ...]:
    """Return the names of the import packages that torch would load by itself, sorted."""
    return tuple(sorted({point.module.partition(".")[0] for point in entry_points(group=GROUP)}))


@functools.cache
def find_accelerator(*, named: bool, covered: frozenset[str] = frozenset()) -> Found:
    """Ask torch, in a separate process, which accelerator it has.

    The packages stay out of this process: they change torch as they are imported, and this process may belong to
    another platform. Unless the platform is named, no process is started if neither torch nor a package is made for any
    device.

    Args:
        named: Whether the user has named the platform.
        covered: Packages of other installed platforms, which report on their devices; loaded only if ``named``.
    """
    if named and (known := _known()):
        return known
    packages = [name for name in device_packages() if named or name not in covered]
    built_for, own_build = _torch_build()
    driven = [name for name in built_for if named or not own_build or _has_driver(name)]
    if not packages and not driven and not named:
        torch = "torch knows no accelerator"
        if built_for:
            torch = f"torch was built for {built_for[0]}, but this machine has no driver for it"
        why = f"{torch}, and no installed package adds a device to torch (entry points {GROUP})"
        return Found(0, why, expected=False)
    found = _asked(packages, [*packages, *(f"torch (built for {name})" for name in driven)])
    if named and found.devices:
        os.environ[VARIABLE] = json.dumps(vars(found))
    return found


def _known() -> Found | None:
    """Return the answer that the process has received which started this one; None if there is none."""
    try:
        return Found(**json.loads(os.environ.get(VARIABLE) or "none"))
    except (ValueError, TypeError):
        return None


def _has_driver(name: str) -> bool:
    return any(Path(file).exists() for file in BUILT_FOR[name])


def _asked(packages: list[str], loaded: list[str]) -> Found:
    """Start the process.

    Args:
        packages: Packages that it loads.
        loaded: Descriptions of everything that may know a device.
    """
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    importing = f"the process that imports {', '.join(['torch', *packages])}"
    try:
        answer = subprocess.run(  # noqa: S603 - this interpreter
            [sys.executable, "-c", _QUESTION, *packages],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Found(0, f"{importing} gave no answer within {LIMIT_S:.0f} seconds", broken=True)
    lines = [line for line in answer.stdout.splitlines() if line.startswith(_ANSWER)]
    if not lines:
        said = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
        return Found(0, f"{importing} failed: {said[-1]}", broken=True)
    device_type, count, backend, failed = json.loads(lines[0].removeprefix(_ANSWER))
    failures = "".join(f"; {name} cannot be loaded: {error}" for name, error in failed.items())
    if not count:
        asked = f" (loaded: {', '.join(loaded)})" if loaded else ""
        return Found(0, f"torch.accelerator reports no device{asked}{failures}", broken=bool(failed))
    devices = f"{count} device{'s'[: count != 1]} of the type {device_type}"
    return Found(count, f"torch.accelerator reports {devices}{failures}", device_type, backend)


def _torch_build() -> tuple[list[str], bool]:
    """Read the file ``version.py`` of the installed torch.

    Returns:
        The device types that it was built for, empty for a build for processors; and whether PyTorch has built it.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return [], True
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    values: dict[str, object] = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(statement.value, ast.Constant):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            values |= {target.id: statement.value.value for target in targets if isinstance(target, ast.Name)}
    local = str(values.get("__version__", "")).partition("+")[2]
    return [name for name in BUILT_FOR if values.get(name)], OWN_BUILD.fullmatch(local) is not None
