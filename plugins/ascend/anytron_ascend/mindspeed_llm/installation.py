"""Find MindSpeed-LLM, MindSpeed and Megatron-LM, and check that their versions match; imports none of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from anytron import PlatformError
from anytron_ascend.mindspeed.installation import checkout_version

ENGINE = "mindspeed_llm"
"""Value of ``engine.name`` for this engine."""
MEGATRON = "0.12.1"
"""The release of Megatron that MindSpeed-LLM is written for (its docs, *Related Product Version Mapping*)."""
LLM_BRANCH = "26.1.0"
MINDSPEED_BRANCH = f"26.1.0_core_r{MEGATRON}"
MEGATRON_TAG = f"core_v{MEGATRON}"
BRANCHES = {"MindSpeed-LLM": LLM_BRANCH, "MindSpeed": MINDSPEED_BRANCH, "Megatron-LM": MEGATRON_TAG}
"""Branches and tags that the engine was tested with."""
PACKAGES = f"megatron-core=={MEGATRON} mbridge==0.15.1"
INSTALL = (
    f"run: git clone -b {LLM_BRANCH} https://gitcode.com/Ascend/MindSpeed-LLM "
    f"&& git clone -b {MINDSPEED_BRANCH} https://gitcode.com/Ascend/MindSpeed "
    f"&& git clone -b {MEGATRON_TAG} https://github.com/NVIDIA/Megatron-LM "
    "&& export PYTHONPATH=$PWD/MindSpeed-LLM:$PWD/MindSpeed:$PWD/Megatron-LM:$PYTHONPATH "
    f"&& pip install --no-deps {PACKAGES}"
)
_WHERE = f"engine.name={ENGINE}"


@dataclass(frozen=True)
class Installation:
    """Versions of MindSpeed-LLM and MindSpeed, by their setup.py, and of the Megatron that Python would import."""

    mindspeed_llm: str
    mindspeed: str
    megatron: str


def find_installation() -> Installation:
    """Find MindSpeed-LLM, MindSpeed and Megatron, installed or on ``sys.path``.

    Raises:
        PlatformError: A package is not installed or not for Megatron 0.12.1; or the package megatron.core and the
            distribution megatron-core, whose version selects patches, have different versions.
    """
    folders = {name: _folder(name, module) for name, module in _MODULES.items()}
    found = Installation(
        mindspeed_llm=checkout_version(folders["MindSpeed-LLM"], INSTALL),
        mindspeed=checkout_version(folders["MindSpeed"], INSTALL),
        megatron=_megatron_version(folders["megatron-core"]),
    )
    if found.mindspeed != MEGATRON or found.megatron != MEGATRON:
        raise PlatformError(
            "MindSpeed-LLM, MindSpeed and Megatron are of different releases.",
            where=", ".join(str(folder) for folder in folders.values()),
            why=f"MindSpeed is for Megatron {found.mindspeed} and Megatron is {found.megatron}; MindSpeed-LLM is "
            f"written for {MEGATRON}",
            fix=INSTALL,
        )
    try:
        known = version("megatron-core")
    except PackageNotFoundError:
        known = "not installed"
    if known != MEGATRON:
        raise PlatformError(
            "The distribution megatron-core does not match the package megatron.core.",
            where=f"{folders['megatron-core']}, and the installed distribution megatron-core",
            why=f"version of the package that Python imports: {found.megatron}; version of the distribution: {known}; "
            "Anytron selects its patches by the version of the distribution",
            fix=f"pip install --no-deps megatron-core=={MEGATRON}",
        )
    return found


_MODULES = {
    "MindSpeed-LLM": "mindspeed_llm",
    "MindSpeed": "mindspeed",
    "megatron-core": "megatron.core",
    "Megatron-LM": "megatron.training",  # not in the distribution megatron-core
}


def _folder(name: str, module: str) -> Path:
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # of the parent, megatron
        spec = None
    if spec is None or spec.origin is None:
        raise PlatformError(
            f"{name} is not installed.",
            where=_WHERE,
            why=f"no package '{module}' can be imported",
            fix=f"{INSTALL}; or set engine.name=megatron and platform.options.adaptor=mindspeed, which do not need it",
        )
    return Path(spec.origin).resolve().parent


def _megatron_version(folder: Path) -> str:
    """Read ``package_info.py``: three constants."""
    text = (folder / "package_info.py").read_text(encoding="utf-8")
    found = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))
    return ".".join(found.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))
