"""Build the invented accelerator and install it where a process finds it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock

SOURCES = Path(__file__).parent / "csrc"
PACKAGE = Path(__file__).parent / "torch_invented"
METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: torch-invented\nVersion: 0.1\n",
    "entry_points.txt": "[torch.backends]\ntorch_invented = torch_invented:autoload\n",
}


def installed() -> Path:
    """Return a directory for PYTHONPATH that has the built package and its entry point; builds at the first call."""
    files = sorted([*SOURCES.iterdir(), *PACKAGE.glob("*.py"), Path(__file__)])
    digest = hashlib.sha256(torch.__version__.encode() + b"".join(file.read_bytes() for file in files)).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anytron"
    target = cache / f"invented-device-{digest[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "invented-device.lock"):
        if not target.is_dir():
            _build(target)
    return target


def _build(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as temporary:
        made = Path(temporary) / "site"
        shutil.copytree(PACKAGE, made / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        metadata = made / "torch_invented-0.1.dist-info"
        metadata.mkdir()
        for name, text in METADATA.items():
            (metadata / name).write_text(text)
        _compile(Path(temporary), made / PACKAGE.name / "libinvented.so")
        made.rename(target)


def _compile(work: Path, library: Path) -> None:
    root = Path(torch.__file__).parent
    include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"

    def compile_one(source: Path) -> str:
        output = str(work / f"{source.stem}.o")
        subprocess.run(
            ["g++", "-std=c++20", "-O1", "-fPIC", "-w", abi, *include, "-c", str(source), "-o", output], check=True
        )
        return output

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, sorted(SOURCES.glob("*.cpp"))))
    subprocess.run(
        ["g++", "-shared", "-o", str(library), *objects, f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"], check=True
    )
