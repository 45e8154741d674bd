"""vLLM on NPUs: its requirements, and settings with which its weights may be replaced. Imports neither package.

Sources are files of vllm-ascend: main at 182b75e (August 2026) and the branches releases/v0.23.0 to releases/v0.26.0rc.
This code was never run on an NPU.
"""

from __future__ import annotations

from importlib.metadata import distributions
from typing import TYPE_CHECKING

from packaging.requirements import Requirement as Dependency
from packaging.specifiers import SpecifierSet

from anytron import ConfigEdit, Diagnostic, Requirement
from anytron_vllm import find_installation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import Distribution

    from anytron import RunConfig
    from anytron_vllm import Installation

PACKAGE = "vllm-ascend"
NZ_MODE = "weight_nz_mode"
"""Key of vllm-ascend's configuration: 0 = weights keep their layout."""
PINNED = ("torch", "torch-npu", "triton-ascend")
"""Packages that vllm-ascend's kernels were built for; its metadata pins a version of each."""
OPTIONS = (
    # examples/rl/rlhf_async_new_apis.py
    ConfigEdit(
        "rollout.options.enforce_eager", True, "vllm-ascend's own RL example generates without graphs", default=True
    ),
    # verl's default (its rollout.yaml).
    ConfigEdit(
        "rollout.options.gpu_memory_utilization",
        0.5,
        "vLLM's default is 0.9 of an NPU, which also holds a training rank",
        default=True,
    ),
    # vllm_ascend/ascend_config.py reads the key in each branch from releases/v0.23.0 to main, before the variable
    # VLLM_ASCEND_ENABLE_NZ; vllm_ascend/utils.py converts weights where it is not 0. On main rl_config sets it too, and
    # turns expandable segments off: they disturb the memory pools of vLLM's sleep mode, which Anytron does not use.
    ConfigEdit(
        f"rollout.options.engine_args.additional_config.{NZ_MODE}",
        0,
        "weights in the layout NZ cannot be replaced in place",
        default=True,
    ),
)


def rollout_edits(run: RunConfig) -> tuple[ConfigEdit, ...]:
    """Return the options with which vLLM's weights may be replaced, if the run generates with vLLM."""
    return OPTIONS if run.rollout.engine == "vllm" and not run.supervised else ()


def requirements() -> Iterator[Requirement]:
    """If vLLM is installed, return vllm-ascend of the same minor version, and the packages that it was built for.

    All are optional, because a run without vLLM needs none of them; :func:`diagnostics` refuses a run with vLLM that
    lacks them.
    """
    vllm = find_installation()
    if vllm is None:
        return
    wanted = _same_minor(vllm)
    yield Requirement(PACKAGE, wanted, f"pip install '{PACKAGE}{wanted}'", optional=True)
    for found in distributions(name=PACKAGE):
        for dependency in map(Dependency, found.requires or ()):
            if dependency.name in PINNED and dependency.marker is None:
                remedy = f"pip install '{dependency}': {PACKAGE} {found.version} was built for it"
                yield Requirement(dependency.name, str(dependency.specifier), remedy, optional=True)
        return  # of several, an import finds the first


def diagnostics(run: RunConfig) -> Iterator[Diagnostic]:
    """Refuse a run that generates with vLLM if vllm-ascend is missing or has another version than vLLM."""
    if run.rollout.engine != "vllm":
        return
    chosen = run.rollout.options.get("engine_args", {}).get("additional_config", {}).get(NZ_MODE, 0)
    if chosen != 0:
        yield Diagnostic(
            "error",
            f"rollout.options.engine_args.additional_config.{NZ_MODE}",
            f"{chosen} lets vllm-ascend keep weights in the layout NZ, in which they cannot be replaced in place",
            "remove it",
        )
    vllm = find_installation(run.rollout.python)
    if vllm is None:
        return  # the engine's own check says so
    found = _beside(vllm) if run.rollout.python else next(iter(distributions(name=PACKAGE)), None)
    wanted = _same_minor(vllm)
    if found is None or not SpecifierSet(wanted).contains(found.version, prereleases=True):
        there = "is not installed" if found is None else f"is {found.version}"
        yield Diagnostic(
            "error",
            "rollout.engine",
            f"on NPUs vLLM {vllm.version} needs {PACKAGE}{wanted}, but {PACKAGE} {there} in vLLM's environment",
            f"pip install '{PACKAGE}{wanted}' in that environment, or set rollout.engine=transformers",
        )


def _same_minor(vllm: Installation) -> str:
    """Require the minor version of the vLLM that is extended (vllm-ascend's page "versioning policy")."""
    major, minor, *_ = vllm.version.split(".")
    return f"=={major}.{minor}.*"


def _beside(vllm: Installation) -> Distribution | None:
    """Find vllm-ascend in another environment: where vLLM lies there."""
    return next(iter(distributions(name=PACKAGE, path=[str(vllm.folder.parent)])), None)
