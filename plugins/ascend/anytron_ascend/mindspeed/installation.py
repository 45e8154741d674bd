"""Find MindSpeed and check it against Megatron and the run's model, without importing either."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from anytron import Diagnostic, PlatformError
from anytron_megatron import models_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron import RunConfig


SUPPORTED = "0.16"
"""The release of megatron-core, and of MindSpeed for it, whose patches this adaptor was made for."""

INSTALL = (
    f"run: git clone -b core_r{SUPPORTED}.0 https://gitcode.com/Ascend/MindSpeed && pip install --no-deps -e MindSpeed "
    f"&& pip install einops scipy protobuf 'megatron-core=={SUPPORTED}.*'"
)

_WHERE = "platform.options.adaptor"


@dataclass(frozen=True)
class Installation:
    """Versions of MindSpeed (for example ``0.16.0``) and megatron-core, and the folder of the package ``mindspeed``."""

    mindspeed: str
    megatron: str
    folder: Path


def find_installation() -> Installation:
    """Find MindSpeed, installed or on ``sys.path``.

    Raises:
        PlatformError: MindSpeed is not installed, its version cannot be determined, or it is for another megatron-core.
    """
    spec = find_spec("mindspeed")
    if spec is None or spec.origin is None:
        raise PlatformError(
            "MindSpeed is not installed.",
            where=_WHERE,
            why="the adaptor mindspeed needs the package 'mindspeed', which cannot be imported",
            fix=f"{INSTALL}; or set platform.options.adaptor=none, which does not need it",
        )
    folder = Path(spec.origin).parent
    try:
        megatron = version("megatron-core")
    except PackageNotFoundError as error:
        raise PlatformError(
            "megatron-core is not installed.",
            where=_WHERE,
            why="the adaptor mindspeed applies MindSpeed's patches to megatron-core",
            fix=INSTALL,
        ) from error
    found = Installation(checkout_version(folder, INSTALL), megatron, folder)
    check_pair(found)
    return found


def check_pair(found: Installation) -> None:
    """Check that MindSpeed and megatron-core are both of the tested release, :data:`SUPPORTED`.

    MindSpeed replaces Megatron's functions with its own copies, which belong to one release of Megatron.

    Raises:
        PlatformError: One of the two is not of release :data:`SUPPORTED`.
    """
    releases = [Version(text).release[:2] for text in (found.mindspeed, found.megatron)]
    if releases == [Version(SUPPORTED).release] * 2:
        return
    raise PlatformError(
        f"MindSpeed and megatron-core are not both of release {SUPPORTED}.",
        where=f"{_WHERE}, {found.folder}",
        why=f"MindSpeed {found.mindspeed} and megatron-core {found.megatron} are installed; MindSpeed's branch "
        f"core_rX.Y.Z is for megatron-core X.Y, and this adaptor was made for {SUPPORTED}",
        fix=INSTALL,
    )


def checkout_version(folder: Path, fix: str) -> str:
    """Read a package's version from the setup.py beside its folder, or else from the installed distribution.

    The package itself does not contain its version, and a checkout on ``PYTHONPATH`` hides an installed one.

    Raises:
        PlatformError: There is neither a setup.py nor a distribution; the error has the given ``fix``.
    """
    setup = folder.parent / "setup.py"
    if setup.is_file():
        found = re.search(r"^__version__ = '([^']+)'", setup.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1]
    try:
        return version(folder.name)
    except PackageNotFoundError as error:
        raise PlatformError(
            f"The version of the package '{folder.name}' cannot be determined.",
            where=str(folder),
            why="there is neither a setup.py beside it nor metadata of an installed distribution",
            fix=fix,
        ) from error


def model_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Refuse multi-latent attention with context parallelism.

    MindSpeed's ring attention takes no sizes of heads from a layer: ``CPDotProductAttentionImpl.__init__``
    (mindspeed/core/context_parallel/dot_product_attention.py) has neither ``k_channels`` nor ``v_channels``, and its
    class that has them stands in for ``kvallgather_cp_algo`` only (mindspeed/features_manager/context_parallel).
    """
    if config.parallel.context_parallel_size == 1:
        return
    for model in models_of(config):
        if model.text.get("kv_lora_rank"):
            yield Diagnostic(
                "error",
                "parallel.context_parallel_size",
                f"MindSpeed's ring attention does not support the multi-latent attention of {model.key}",
                "set parallel.context_parallel_size=1, or platform.options.adaptor=none",
            )
