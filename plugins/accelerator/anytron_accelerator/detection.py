"""Find out, without importing torch or a device's package here, whether torch has an accelerator."""

from __future__ import annotations

import ast
import functools
import json
import os
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
"""Variables of torch/version.py that are not None in a torch that was built for such devices, and files of which a
driver of such a device makes at least one. Most people have a torch that was built for CUDA, also on machines without a
GPU. There, no process is started that imports torch, unless the user names this platform."""
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
    """Import packages that torch would load by itself, sorted."""
    return tuple(sorted({point.module.partition(".")[0] for point in entry_points(group=GROUP)}))


@functools.cache
def find_accelerator(*, named: bool, covered: frozenset[str] = frozenset()) -> Found:
    """Ask torch, in a process of its own; at once if neither torch nor an installed package knows any device.

    The packages stay out of this process: they change torch as they are imported, and this process may belong to
    another platform.

    Args:
        named: Whether the user has named the platform, so that it is worth the time to ask.
        covered: Packages on whose devices other installed platforms report; left out unless ``named``.
    """
    if named and (known := os.environ.get(VARIABLE)):
        return Found(**json.loads(known))
    packages = [name for name in device_packages() if named or name not in covered]
    built_for = _torch_is_built_for()
    driven = [name for name in built_for if named or any(Path(file).exists() for file in BUILT_FOR[name])]
    if not packages and not driven:
        torch = (
            f"torch is built for {built_for[0]}, whose driver is not here"
            if built_for
            else "torch knows no accelerator"
        )
        return Found(0, f"{torch}, and no installed package adds one (entry points {GROUP})", expected=False)
    found = _asked(packages, ", ".join([*packages, *(f"torch, built for {name}" for name in driven)]))
    if named and found.devices:
        os.environ[VARIABLE] = json.dumps(vars(found))
    return found


def _asked(packages: list[str], known_by: str) -> Found:
    """Start the process.

    Args:
        packages: Packages that it loads.
        known_by: Description of what may know a device.
    """
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    try:
        answer = subprocess.run(  # noqa: S603 - this interpreter
            [sys.executable, "-c", _QUESTION, *packages],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Found(0, f"{known_by}: torch gave no answer within {LIMIT_S:.0f} seconds", broken=True)
    lines = [line for line in answer.stdout.splitlines() if line.startswith(_ANSWER)]
    if not lines:
        said = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
        return Found(0, f"{known_by}: torch cannot be asked: {said[-1]}", broken=True)
    device_type, count, backend, failed = json.loads(lines[0].removeprefix(_ANSWER))
    failures = "".join(f"; {name} cannot be loaded: {error}" for name, error in failed.items())
    if not count:
        return Found(0, f"torch.accelerator reports no device of {known_by}{failures}", broken=bool(failed))
    devices = f"{count} device{'s'[: count != 1]} of the type {device_type}"
    return Found(count, f"torch.accelerator reports {devices}{failures}", device_type, backend)


def _torch_is_built_for() -> list[str]:
    """Device types of the installed torch, from its file ``version.py``; empty for a build for processors."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    values: dict[str, object] = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(statement.value, ast.Constant):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            values |= {target.id: statement.value.value for target in targets if isinstance(target, ast.Name)}
    return [name for name in BUILT_FOR if values.get(name)]
