"""vLLM on NPUs: its requirements, and settings with which its weights may be replaced. Imports neither package.

Sources are files of vllm-ascend: main at 182b75e (August 2026) and the branches releases/v0.23.0 to releases/v0.26.0rc.
The tests in ``plugins/ascend/tests/vllm_ascend`` read there what is said here. This code was never run on an NPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement as Dependency
from packaging.specifiers import SpecifierSet

from anytron import ConfigEdit, Diagnostic, Requirement
from anytron_vllm import find_installation, has_experts, model_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from importlib.metadata import Distribution

    from anytron import RunConfig
    from anytron_vllm import Installation

PACKAGE = "vllm-ascend"
ADDITIONAL = "rollout.options.engine_args.additional_config"
"""vLLM's argument with vllm-ascend's own configuration."""
NZ_MODE, FUSED_MC2 = "weight_nz_mode", "enable_fused_mc2"
"""Keys of vllm-ascend's configuration. Each overrides a variable of the environment (``_get_config_value`` in
vllm_ascend/ascend_config.py)."""
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
    # turns expandable segments off: they disturb the memory pools of vLLM's sleep mode. They are off unless
    # platform.options.expandable_segments is set.
    ConfigEdit(f"{ADDITIONAL}.{NZ_MODE}", 0, "weights in the layout NZ cannot be replaced in place", default=True),
    # AscendUnquantizedFusedMoEMethod.process_weights_after_loading casts experts to NZ for this kernel, in any nz mode.
    ConfigEdit(
        f"{ADDITIONAL}.{FUSED_MC2}", 0, "its kernel keeps experts in the layout NZ, whatever else is set", default=True
    ),
)


@dataclass(frozen=True)
class Setting:
    """A key of vllm-ascend's configuration with which a rollout would go wrong.

    Attributes:
        key: The key in ``additional_config``.
        why: What goes wrong, and the file of vllm-ascend that shows it.
    """

    key: str
    why: str


REFUSED = (
    Setting(NZ_MODE, "vllm-ascend then keeps weights in the layout NZ, in which a weight update cannot replace them"),
    Setting(
        FUSED_MC2,
        "the kernel that it turns on keeps experts in the layout NZ, in which a weight update cannot replace them "
        "(vllm_ascend/ops/fused_moe/fused_moe.py)",
    ),
    Setting(
        "enable_reduce_sample",
        "then each process samples from its own part of the vocabulary, and log-probs are normalised over that part "
        "(vllm_ascend/ops/vocab_parallel_embedding.py)",
    ),
    Setting(
        "eplb_config",
        "vllm-ascend then copies or moves experts between NPUs: on main a weight update overwrites the table "
        "of their places (vllm_ascend/ops/fused_moe/routed_experts.py), and older branches were not examined",
    ),
    Setting(
        "multistream_overlap_shared_expert",
        "vllm-ascend then computes with the shared experts while a weight update loads them "
        "(vllm_ascend/ops/fused_moe/fused_moe.py; on main vllm_ascend/ops/fused_moe/shared_experts.py)",
    ),
    Setting(
        "layer_sharding",
        "vllm-ascend 0.23 then frees the weights of some layers after loading, so that new ones cannot be loaded "
        "(vllm_ascend/ops/layer_shard_linear.py)",
    ),
)
"""Settings that are refused unless their value is empty: 0, False or nothing."""
SPARSE_ATTENTION = "index_topk"
"""Field of a Hugging Face config: attention chooses keys by an index (DeepSeek-V3.2, GLM-5)."""
MODELSLIM_FILE = "quant_model_description.json"
"""A file in a model directory with which vllm-ascend quantises (vllm_ascend/quantization/modelslim_config.py)."""
WAKE_TRANSPOSES = SpecifierSet(">=0.23,<0.27")
"""Versions whose ``wake_up`` transposes the weights of experts that are not quantised (vllm_ascend/worker/worker.py);
main does not."""


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
    # Its dependency triton-ascend is not in each index, so that pip alone may fail.
    yield Requirement(PACKAGE, wanted, f"install {PACKAGE}{wanted} as its documentation says", optional=True)
    for found in distributions(name=PACKAGE):
        for dependency in map(Dependency, found.requires or ()):
            if dependency.name in PINNED and dependency.marker is None:
                remedy = f"pip install '{dependency}': {PACKAGE} {found.version} was built for it"
                yield Requirement(dependency.name, str(dependency.specifier), remedy, optional=True)
        return  # of several, an import finds the first


def diagnostics(run: RunConfig) -> Iterator[Diagnostic]:
    """Refuse a run that generates with vLLM if vllm-ascend is missing, unsuitable, or would use wrong weights."""
    if run.rollout.engine != "vllm":
        return
    yield from _settings(run)
    key, model = _model(run)
    yield from _weights(key, model)
    vllm = find_installation(run.rollout.python)
    if vllm is None:
        return  # the engine's own check says so
    found = _beside(vllm) if run.rollout.python else next(iter(distributions(name=PACKAGE)), None)
    yield from _installed(vllm, found)
    if found is not None:
        yield from _unfit(found, experts=run.rollout.sleep and has_experts(model))


def _settings(run: RunConfig) -> Iterator[Diagnostic]:
    """Refuse settings of :data:`REFUSED`, and quantisation by vLLM."""
    arguments = run.rollout.options.get("engine_args", {})
    additional = arguments.get("additional_config") or {}
    for one in REFUSED:
        if chosen := additional.get(one.key):
            yield Diagnostic("error", f"{ADDITIONAL}.{one.key}", f"it is {chosen!r}: {one.why}", "remove it")
    if chosen := run.rollout.quantization:
        yield Diagnostic(
            "error",
            "rollout.quantization",
            f"with {chosen!r}, vllm-ascend keeps weights quantised in layouts that Anytron does not know, but a weight "
            "update sends weights that are not quantised",
            "remove it",
        )


def _weights(key: str, model: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Refuse models whose layers cannot take weights a second time."""
    if key == "model.path" and model and (Path(model["directory"]) / MODELSLIM_FILE).is_file():
        message = (
            f"the directory has {MODELSLIM_FILE}: vllm-ascend would quantise the model, and a weight update sends "
            "weights that are not quantised"
        )
        yield Diagnostic("error", key, message, "use a directory without this file, or rollout.engine=transformers")
    if model.get(SPARSE_ATTENTION):
        message = (
            f"the model has sparse attention ({SPARSE_ATTENTION}), and vllm-ascend frees its kv_b_proj after loading, "
            "so that new weights cannot be loaded (vllm_ascend/attention/sfa_v1.py)"
        )
        yield Diagnostic("error", key, message, "set rollout.engine=transformers")


def _installed(vllm: Installation, found: Distribution | None) -> Iterator[Diagnostic]:
    """Refuse a vLLM without vllm-ascend of the same minor version."""
    wanted = _same_minor(vllm)
    if found is None or not SpecifierSet(wanted).contains(found.version, prereleases=True):
        there = "is not installed" if found is None else f"is {found.version}"
        yield Diagnostic(
            "error",
            "rollout.engine",
            f"on NPUs vLLM {vllm.version} needs {PACKAGE}{wanted}, but {PACKAGE} {there} in vLLM's environment",
            f"install {PACKAGE}{wanted} in that environment as its documentation says, or set "
            "rollout.engine=transformers",
        )


def _unfit(found: Distribution, *, experts: bool) -> Iterator[Diagnostic]:
    """Refuse a vllm-ascend that was built for the 310P, or that cannot wake up a model with experts.

    Args:
        found: The installed vllm-ascend.
        experts: Whether vLLM sleeps while the model is trained, and the model has experts.
    """
    built = Path(str(found.locate_file("vllm_ascend/_build_info.py")))
    if built.is_file() and re.search(r"__device_type__ = '_310P'", built.read_text(encoding="utf-8")):
        yield Diagnostic(
            "error",
            "rollout.engine",
            f"{PACKAGE} {found.version} was built for the Atlas 300I (310P), where it keeps weights in the layout NZ "
            "whatever is set, and they cannot be replaced in place (vllm_ascend/utils.py, _should_trans_nz)",
            "set rollout.engine=transformers",
        )
    if experts and WAKE_TRANSPOSES.contains(found.version, prereleases=True):
        yield Diagnostic(
            "error",
            "rollout.sleep",
            f"{PACKAGE} {found.version} transposes the weights of experts when it wakes up, so that new ones cannot "
            "be loaded (vllm_ascend/worker/worker.py)",
            "set rollout.sleep=false",
        )


def _model(run: RunConfig) -> tuple[str, Mapping[str, Any]]:
    """The key of the model and its Hugging Face config, with its language model's fields and ``directory`` on top.

    Empty if the config cannot be read, which the core reports.
    """
    key, fields = model_config(run)
    place = {"directory": run.model.path} if run.model.path else {}
    return key, {**fields, **(fields.get("text_config") or {}), **place}


def _same_minor(vllm: Installation) -> str:
    """Require the minor version of the vLLM that is extended (vllm-ascend's page "versioning policy")."""
    major, minor, *_ = vllm.version.split(".")
    return f"=={major}.{minor}.*"


def _beside(vllm: Installation) -> Distribution | None:
    """Find vllm-ascend in another environment: where vLLM lies there."""
    return next(iter(distributions(name=PACKAGE, path=[str(vllm.folder.parent)])), None)
