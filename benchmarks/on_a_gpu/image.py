"""The Python installation of an image, and an environment on top of it that has the carried wheels besides.

Everything here must work with a Python that has nothing: no pip, no ``packaging``, maybe no writable HOME.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from wheels import Distribution, digest, normalised

if TYPE_CHECKING:
    from collections.abc import Iterable

TORCH = "2.6"
"""The oldest that Anytron takes."""
PROBE = Path(__file__).with_name("probe.py")
CACHES = {
    "HOME": "home",
    "XDG_CACHE_HOME": "cache",
    "HF_HOME": "cache/huggingface",
    "MODELSCOPE_CACHE": "cache/modelscope",
    "MPLCONFIGDIR": "cache/matplotlib",
    "TORCHINDUCTOR_CACHE_DIR": "cache/inductor",
    "TRITON_CACHE_DIR": "cache/triton",
}
"""Folders that libraries write into, which may be read-only in an image."""
DROPPED = ("PYTHONPATH", "PYTHONHOME", "OUT", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")
"""Variables of an image. The last two, which NVIDIA's own set, round products in float32 to ten bits: tests and checks
compare real ones."""


def installed(name: str) -> Distribution | None:
    """Find a distribution of the image, by its normalised name."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    # A folder of metadata that is half removed has no version.
    version = found.metadata["Version"]
    return Distribution(normalised(name), version, tuple(found.requires or ())) if version else None


def search_path() -> list[str]:
    """The image's folders of packages: ``sys.path`` without the standard library and this program's."""
    own = {str(Path(__file__).parent), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    dynamic = sysconfig.get_config_var("DESTSHARED")
    return [path for path in sys.path if Path(path).is_dir() and path not in own | {dynamic}]


class Environment:
    """A virtual environment whose packages go before the image's.

    It reaches the image's by a ``.pth`` file: ``--system-site-packages`` would pass over an image whose Python is a
    virtual environment itself.

    Args:
        folder: Where it is, or will be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._note = folder / "anytron_wheels.json"

    def make(self) -> None:
        """Make it for this image, anew if it was made for another."""
        image = {"python": [sys.executable, *sys.version_info[:3]], "path": search_path()}
        if self._read().get("image") == image:
            return
        if self.folder.exists():
            shutil.rmtree(self.folder)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.folder], check=True)
        (site_packages,) = self.folder.glob("lib/python*/site-packages")
        lines = [f"import site; site.addsitedir({path!r})" for path in image["path"]]
        (site_packages / "zz_image.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._write({"image": image, "wheels": {}})

    def install(self, pip: Path, wheels: Iterable[Path]) -> list[str]:
        """Install those wheels that it does not have yet; return their names.

        Each is named to pip as a file, without its dependencies: what those are is decided before (:mod:`wheels`).
        """
        note = self._read()
        new = {wheel: digest(wheel) for wheel in wheels}
        new = {wheel: value for wheel, value in new.items() if note["wheels"].get(wheel.name) != value}
        if new:
            # Images come with constraints of their own (PIP_CONSTRAINT), which these versions break.
            clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
            subprocess.run(
                [
                    self.python, pip / "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index",
                    "--no-deps", "--no-compile", "--no-cache-dir", "--force-reinstall", *new,
                ],
                env={**clean, "PIP_CONFIG_FILE": os.devnull},
                check=True,
            )  # fmt: skip
            note["wheels"] |= {wheel.name: value for wheel, value in new.items()}
            self._write(note)
        return sorted(wheel.name for wheel in new)

    def variables(self, work: Path, platform: str) -> dict[str, str]:
        """The environment variables of what runs in it: no network, and caches where one can write."""
        kept = {name: value for name, value in os.environ.items() if name not in DROPPED}
        folders = {name: str(work / place) for name, place in CACHES.items()}
        for folder in folders.values():
            Path(folder).mkdir(parents=True, exist_ok=True)
        return {
            **kept,
            **folders,
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "VIRTUAL_ENV": str(self.folder),
            "ANYTRON_PLATFORM": platform,
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONNOUSERSITE": "1",
        }

    def _read(self) -> dict:
        return json.loads(self._note.read_text(encoding="utf-8")) if self._note.exists() else {}

    def _write(self, note: dict) -> None:
        self._note.write_text(json.dumps(note), encoding="utf-8")
