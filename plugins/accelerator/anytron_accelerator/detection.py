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
"""Variables of torch/version.py that are not None in a torch that was built for such devices, and files of which a driver
of such a device makes at least one. Most people have a torch that was built for CUDA, also on machines without a GPU:
there, no process is started that imports torch."""
LIMIT_S = 180.0

ANSWER = "anytron found: "
_QUESTION = f"""
import json, torch
from importlib.metadata import entry_points
for point in entry_points(group="{GROUP}"):
    point.load()()
found = torch.accelerator.current_accelerator(check_available=True)
print("\\n{ANSWER}" + json.dumps(None if found is None else [found.type, torch.accelerator.device_count()]))
"""


@dataclass(frozen=True)
class Found:
    """The accelerator that torch reports.

    Attributes:
        devices: Number of devices; 0 = torch has no accelerator.
        reason: Description of the accelerator, or why there is none. No full stop.
    """

    devices: int
    reason: str


def device_packages() -> tuple[str, ...]:
    """Import packages that torch would load by itself, sorted."""
    return tuple(sorted({point.module.partition(".")[0] for point in entry_points(group=GROUP)}))


@functools.cache
def find_accelerator() -> Found:
    """Ask torch, in a process of its own; at once if neither torch nor an installed package knows any device.

    The packages stay out of this process: they change torch as they are imported, and this process may belong to
    another platform.
    """
    packages = device_packages()
    built_for = _torch_is_built_for()
    driven = [name for name in built_for if any(Path(file).exists() for file in BUILT_FOR[name])]
    if not packages and not driven:
        torch = (
            f"torch is built for {built_for[0]}, whose driver is not here"
            if built_for
            else "torch knows no accelerator"
        )
        return Found(0, f"{torch}, and no installed package adds one (entry points {GROUP})")
    known_by = ", ".join([*packages, *(f"torch, built for {name}" for name in driven)])
    asked = [sys.executable, "-c", _QUESTION]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    try:
        answer = subprocess.run(  # noqa: S603 - this interpreter
            asked, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Found(0, f"{known_by}: torch gave no answer within {LIMIT_S:.0f} seconds")
    lines = [line for line in answer.stdout.splitlines() if line.startswith(ANSWER)]
    if not lines:
        said = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
        return Found(0, f"{known_by}: torch cannot be asked: {said[-1]}")
    reported = json.loads(lines[0].removeprefix(ANSWER))
    if reported is None:
        return Found(0, f"torch.accelerator reports no device of {known_by}")
    device_type, count = reported
    return Found(count, f"torch.accelerator reports {count} device{'s'[: count != 1]} of the type {device_type}")


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
