"""``anytron-megatron SCRIPT``: a script of Megatron-LM, such as ``pretrain_gpt.py``, on the device stack."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from importlib.machinery import SourceFileLoader
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.version import Version

from anytron.base.errors import AnytronError, ConfigError
from anytron.cli.main import print_error
from anytron.device.loading import open_session
from anytron.device.patches import Phase
from anytron.device.stack import open_device_stack
from anytron_megatron.patches.catalog import MEGATRON
from anytron_megatron.patches.catalog.scripts import SCRIPTS

FSDP = ("--use-megatron-fsdp", "--use-torch-fsdp2")
"""Options with which Megatron refuses CUDA_DEVICE_MAX_CONNECTIONS=1."""
_SCRIPT = "_ANYTRON_MEGATRON_SCRIPT"
"""Environment variable that names the script to processes that it spawns: runpy replaces their ``sys.argv[0]``."""
USAGE = """Usage: anytron-megatron SCRIPT [OPTIONS OF THE SCRIPT]

Run a script of a checkout of Megatron-LM (pretrain_gpt.py) on the platform that ANYTRON_PLATFORM names, or on the only
usable platform. The checkout must have the version of the installed megatron-core.

NPROC_PER_NODE sets the number of ranks on this machine; 1 without it. For several machines, start the ranks yourself:
torchrun [OPTIONS OF TORCHRUN] -m anytron_megatron.launch SCRIPT [OPTIONS OF THE SCRIPT]
"""


def main() -> None:
    """Run the script that the first argument names, on as many ranks as ``NPROC_PER_NODE`` says (default: 1).

    With more than one rank, ``torchrun`` starts the ranks; a process that it has started runs the script itself.
    Exit with the status of the script, or of ``torchrun``; 1 after an :class:`AnytronError`, printed as what, where,
    why and fix; 2 after wrong usage.
    """
    if len(sys.argv) < 2:
        sys.stderr.write(USAGE)
        raise SystemExit(2)
    if sys.argv[1] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return
    script = Path(sys.argv[1])
    try:
        ranks = _ranks()
        _require_checkout(script)
        if "LOCAL_RANK" not in os.environ:  # torchrun sets it; a scheduler may set RANK for the whole machine
            open_session()  # an error of the platform is printed once, without torchrun's traceback
            if ranks > 1:
                _start_ranks(ranks)
                return
        sys.argv = sys.argv[1:]
        _run(script, "__main__")
    except AnytronError as error:
        print_error(error)
        raise SystemExit(1) from None


def _ranks() -> int:
    text = os.environ.get("NPROC_PER_NODE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"NPROC_PER_NODE is '{text}', which is not a number of ranks.",
            where="environment variable NPROC_PER_NODE",
            why="it sets the number of ranks on this machine",
            fix="set it to a whole number of at least 1, or unset it",
        )
    return int(text)


def _require_checkout(script: Path) -> None:
    """Check that the script and ``megatron.training`` exist, and that ``megatron.core`` has the installed version.

    A script imports from its own folder, which becomes the first entry of ``sys.path``; the checkout that contains the
    folder becomes the second.
    """
    installed = Version(Version(version(MEGATRON)).public)
    clone = f"git clone --branch core_v{installed} https://github.com/NVIDIA/Megatron-LM"
    if not script.is_file():
        raise ConfigError(
            f"There is no file {script}.",
            where="anytron-megatron SCRIPT",
            why="the first argument is the path of a script of Megatron-LM",
            fix=f"{clone}, and pass the path of its pretrain_gpt.py",
        )
    sys.path.insert(0, str(script.resolve().parent))
    checkouts = (parent for parent in script.resolve().parents if (parent / "megatron" / "training").is_dir())
    if (checkout := next(checkouts, None)) is not None:
        sys.path.insert(1, str(checkout))  # before the installed package, as for a script in the checkout itself
    if find_spec("megatron.training") is None:
        raise ConfigError(
            "There is no module megatron.training.",
            where=str(script),
            why="neither a folder that contains the script nor an installed package has it; the package megatron-core "
            "is only a part of Megatron-LM",
            fix=f"{clone}, and run a script in it",
        )
    core = find_spec("megatron.core")
    assert core is not None, "megatron-core is a dependency"
    assert core.origin is not None
    found = _version_of(Path(core.origin).parent)
    if found != installed:
        raise ConfigError(
            f"The checkout has megatron-core {found}, and {installed} is installed.",
            where=core.origin,
            why="Anytron selects its patches by the version of the installed package",
            fix=f"git -C {Path(core.origin).parents[2]} checkout core_v{installed}, or "
            f"pip install --no-deps megatron-core=={found}",
        )


def _version_of(core: Path) -> Version:
    """Read the version of a folder ``megatron/core`` without importing it."""
    text = (core / "package_info.py").read_text(encoding="utf-8")
    parts = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE)
    before = re.search(r"^PRE_RELEASE = ['\"](\w*)['\"]", text, re.MULTILINE)
    return Version(".".join(parts) + (before[1] if before else ""))


def _start_ranks(ranks: int) -> None:
    """Start the ranks as ``torchrun`` does, and wait for them."""
    from torch.distributed import run

    run.main(["--standalone", "--nproc-per-node", str(ranks), "-m", "anytron_megatron.launch", *sys.argv[1:]])


def _run(script: Path, name: str) -> dict[str, Any]:
    """Open the device stack, which ends with the process, and run the script in it as the module ``name``.

    Returns:
        The script's global variables.
    """
    if not any(word.startswith(FSDP) for word in sys.argv):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron demands it for sequence parallelism
    # Megatron compiles an extension for the python3-config of the PATH, which may belong to another Python.
    suffix = f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"
    os.environ["MAKEFLAGS"] = f"{os.environ.get('MAKEFLAGS', '')} {suffix}".strip()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for variable, value in alone.items():
        os.environ.setdefault(variable, value)
    stack = open_device_stack()
    stack.apply_phase(Phase.BEFORE_PARALLEL_INIT)
    stack.apply_phase(Phase.BEFORE_BUILD, SCRIPTS if stack.platform.redirects_torch_cuda else ())
    os.environ[_SCRIPT] = str(script.resolve())
    sys.argv[0] = str(script)
    loader = SourceFileLoader(name, str(script))
    module = ModuleType(name)
    module.__file__ = str(script)
    # A process that the script spawns runs this file in place of the script (multiprocessing.spawn reads the name).
    module.__spec__ = find_spec("anytron_megatron.launch")
    sys.modules["__main__"] = sys.modules[name] = module
    loader.exec_module(module)
    return vars(module)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # in a process that the script has spawned
    globals().update(_run(Path(os.environ[_SCRIPT]), "__mp_main__"))
