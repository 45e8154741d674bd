"""Huawei NPUs as a platform."""

from __future__ import annotations

import functools
import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from anytron import (
    Availability,
    ConfigError,
    Decision,
    Diagnostic,
    Feature,
    Limit,
    PeakFlops,
    Platform,
    Probe,
    Requirement,
    hookimpl,
)
from anytron_ascend import cann, vllm_ascend
from anytron_ascend.adaptors.adaptor import PortableAdaptor
from anytron_ascend.adaptors.mindspeed import MindSpeedAdaptor
from anytron_ascend.adaptors.mindspeed_llm import MindSpeedLlmAdaptor
from anytron_ascend.mindspeed_llm.installation import ENGINE as MINDSPEED_LLM
from anytron_ascend.options import (
    EXPANDABLE_SEGMENTS_SINCE,
    VISIBLE_DEVICES,
    AscendOptions,
    visible_devices_mistake,
    worker_environment,
)
from anytron_ascend.patches import PATCHES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pydantic import BaseModel

    from anytron import ConfigEdit, DeviceRuntime, EngineFacts, Ledger, Patch, PatchContext, Phase, RunConfig
    from anytron.kernels import AttentionKernel, AttentionSpec, KernelName, KernelSpec
    from anytron.sequences import AttnMask, MaskRequest, ModelInputs
    from anytron_ascend.adaptors.adaptor import Adaptor

_SOURCE_CANN = "source the set_env.sh of the CANN toolkit (by default in /usr/local/Ascend/ascend-toolkit)"
_UNAVAILABLE = {
    "megatron_adaptor": "no package registry has MegatronAdaptor, and Anytron was tested with no release of it",
}
_SINKS = (
    "aclnnFlashAttentionScoreV3",
    "aclnnFlashAttentionScoreGradV3",
    "aclnnFlashAttentionVarLenScoreV5",
    "aclnnFlashAttentionUnpaddingScoreGradV5",
)
"""Operators that ``npu_fusion_attention`` calls for attention with sinks; CANN has had them since 8.5.0."""
_OTHER = "or choose another platform, for example ANYTRON_PLATFORM=cpu"


class AscendPlatform(Platform):
    """The platform ``ascend``: models use portable modules with torch_npu's kernels, or MindSpeed's modules."""

    name = "ascend"
    api_version = 1
    options_model = AscendOptions
    device_packages = ("torch_npu",)
    visible_devices_variable = VISIBLE_DEVICES
    socket_interface_variables = ("HCCL_SOCKET_IFNAME",)
    environment_prefixes = ("ASCEND_", "ATB_", "CPU_AFFINITY_CONF", "HCCL_", "TASK_QUEUE_ENABLE")
    ray_resource = "NPU"

    def __init__(self) -> None:
        self._options = AscendOptions()
        self._adaptor: Adaptor = PortableAdaptor()

    @property
    def portable_modules(self) -> bool:  # type: ignore[override]
        """Whether models are built from the portable modules, as the adaptor says."""
        return self._adaptor.portable_modules

    @property
    def redirects_torch_cuda(self) -> bool:  # type: ignore[override]
        """Whether the engine redirects ``torch.cuda`` to the NPU, as the adaptor says."""
        return self._adaptor.redirects_torch_cuda

    def configure_options(self, options: BaseModel | None) -> None:
        """Choose the adaptor (:func:`make_adaptor`)."""
        assert isinstance(options, AscendOptions)
        self._options = options
        self._adaptor = make_adaptor(options, self.engine)

    def decisions(self) -> list[Decision]:
        """Return the choice of modules, the adaptor's or the portable ones, and its reason."""
        if self.engine == MINDSPEED_LLM:
            return [Decision("modules", MINDSPEED_LLM, f"the engine {MINDSPEED_LLM} has its own modules")]
        adaptor = self._options.adaptor
        set_by = "is set" if "adaptor" in self._options.model_fields_set else "is the default"
        modules = "portable" if adaptor == "none" else adaptor
        return [Decision("modules", modules, f"platform.options.adaptor={adaptor} {set_by}")]

    def limits(self) -> list[Limit]:
        """Return what the adaptor does not support, and attention sinks if CANN lacks an operator for them."""
        missing = [name for name in _SINKS if not cann.has_operator(name)]
        reason = f"this CANN has no {missing[0]}, which came with CANN 8.5.0" if missing else ""
        own = [Limit(Feature.ATTENTION_SINKS, reason)] if missing else []
        return [*own, *self._adaptor.limits()]

    def probe(self) -> Probe:
        """Distinguish these cases: torch_npu missing or incompatible, CANN missing, no NPU, usable.

        Neither torch nor torch_npu is imported: torch_npu changes torch as it is imported, which a
        run on another platform must not see.
        """
        torch_npu = _installed("torch-npu")
        if torch_npu is None:
            return _without_torch_npu()
        torch = _installed("torch") or "missing"
        if torch.split(".")[:2] != torch_npu.split(".")[:2]:
            return Probe(
                Availability.BROKEN,
                f"torch_npu {torch_npu} is installed and torch is {torch}; their minor versions must be the same",
                f"pip install torch-npu=={torch.partition('+')[0]}, {_OTHER}",
            )
        try:
            devices = cann.device_count()
        except cann.CannError as error:
            reason = f"torch_npu {torch_npu} is installed, but CANN cannot be used: {error}"
            return Probe(Availability.BROKEN, reason, f"{_SOURCE_CANN}, {_OTHER}")
        if mistake := visible_devices_mistake(os.environ):
            fix = f"set {VISIBLE_DEVICES} to ids of NPUs in ascending order, for example 0,1"
            return Probe(Availability.BROKEN, mistake, fix)
        if devices == 0:
            reason = f"torch_npu {torch_npu} and CANN are installed, and CANN finds no NPU"
            fix = f"check that `npu-smi info` lists NPUs and that {VISIBLE_DEVICES} names some of them"
            return Probe(Availability.ABSENT, reason, fix)
        return Probe(Availability.USABLE, f"{devices} NPU(s), torch_npu {torch_npu}", devices=devices)

    def runtime(self) -> DeviceRuntime:
        """The runtime of the NPUs of this process; imports torch_npu."""
        return _runtime()

    def peak_flops(self, dtype: str) -> PeakFlops:
        """Return ``platform.options.peak_tflops``; Huawei publishes no peak for the device names of its driver."""
        del dtype
        tflops = self._options.peak_tflops
        if tflops is None:
            return PeakFlops(None, "Huawei publishes no peak for each NPU: set platform.options.peak_tflops")
        return PeakFlops(tflops * 1e12, "platform.options.peak_tflops")

    def prepare_engine(self, facts: EngineFacts, ledger: Ledger) -> None:
        """Set the adaptor's process-wide state."""
        self._adaptor.prepare_engine(facts, ledger)

    @hookimpl
    def requirements(self) -> list[Requirement]:
        """Return torch_npu, whose minor version the probe compares with torch's, the adaptor's packages, and vLLM."""
        own = Requirement("torch-npu", ">=2.6", "pip install torch-npu==<the version of your torch>")
        return [own, *self._adaptor.requirements(), *vllm_ascend.requirements()]

    @hookimpl
    def configure(self, config: RunConfig) -> list[ConfigEdit | Diagnostic]:
        """Check the options, vLLM's packages and the adaptor against the run, and set vLLM's options."""
        own = _option_diagnostics(self._options, config.engine.name)
        checked = [*own, *self._adaptor.configure(config), *vllm_ascend.diagnostics(config)]
        return [*checked, *vllm_ascend.rollout_edits(config)]

    @hookimpl
    def runtime_env(self, config: RunConfig) -> dict[str, str]:
        """Set the variables of HCCL, of the allocator and of torch."""
        own = worker_environment(self._options, deterministic=config.engine.repeatable)
        return {**own, **self._adaptor.runtime_env()}

    @hookimpl
    def patch_model(self, phase: Phase, context: PatchContext) -> Iterable[Patch]:
        """Return the patches of torch_npu and of the adaptor, in training ranks."""
        if context.role != "trainer":
            return []
        return [*(patch for patch in PATCHES if patch.phase is phase), *self._adaptor.patch_model(phase, context)]

    @hookimpl
    def build_attn_mask(self, request: MaskRequest) -> AttnMask | None:
        """Build the mask as the adaptor's kernels read it; None = Anytron's default mask."""
        return self._adaptor.build_attn_mask(request)

    @hookimpl
    def preprocess_sequences(self, inputs: ModelInputs) -> ModelInputs | None:
        """Add the adaptor's process-wide state to the micro-batch's scope; None = the adaptor has none."""
        return self._adaptor.preprocess_sequences(inputs)

    @hookimpl
    def attention_kernel(self, spec: AttentionSpec) -> AttentionKernel | None:
        """Return the attention kernel of the engine's adaptor; None if it has none, or it must be company-invariant."""
        return None if spec.invariant else self._adaptor.attention_kernel(spec)

    @hookimpl
    def fused_kernel(self, name: KernelName, spec: KernelSpec) -> Callable[..., Any] | None:
        """Return the fused kernel ``name`` of the engine's adaptor; None if it has none, or if it must be invariant."""
        return None if spec.invariant else self._adaptor.fused_kernel(name)


def make_adaptor(options: AscendOptions, engine: str | None) -> Adaptor:
    """Make the adaptor that the training engine implies, else the one that the options name.

    Raises:
        ConfigError: The adaptor is not available.
    """
    if engine == MINDSPEED_LLM:
        return MindSpeedLlmAdaptor()
    if options.adaptor == "none":
        return PortableAdaptor()
    if options.adaptor == "mindspeed":
        return MindSpeedAdaptor(options.mindspeed)
    raise ConfigError(
        f"The adaptor {options.adaptor} is not available.",
        where="platform.options.adaptor",
        why=_UNAVAILABLE[options.adaptor],
        fix="set platform.options.adaptor=none",
    )


def _option_diagnostics(options: AscendOptions, engine: str) -> Iterable[Diagnostic]:
    if engine == MINDSPEED_LLM and "adaptor" in options.model_fields_set:
        yield Diagnostic(
            "error",
            "platform.options.adaptor",
            f"the adaptor is set to {options.adaptor}, but the engine {MINDSPEED_LLM} selects its own adaptor",
            "remove platform.options.adaptor, or set engine.name=megatron",
        )
    found = _installed("torch-npu")
    if options.expandable_segments and (found is None or Version(found) < Version(EXPANDABLE_SEGMENTS_SINCE)):
        yield Diagnostic(
            "error",
            "platform.options.expandable_segments",
            f"expandable segments need torch_npu {EXPANDABLE_SEGMENTS_SINCE} or later, but "
            f"{'torch_npu is not installed' if found is None else f'torch_npu {found} is installed'}",
            "set platform.options.expandable_segments=false",
        )


def _without_torch_npu() -> Probe:
    remedy = f"pip install torch-npu=={(_installed('torch') or '<the version of your torch>').partition('+')[0]}"
    nodes = cann.device_nodes()
    if nodes:
        reason = f"there are NPUs ({', '.join(nodes)}), but torch_npu is not installed"
        return Probe(Availability.BROKEN, reason, f"{remedy}, {_OTHER}")
    return Probe(Availability.ABSENT, "torch_npu is not installed, and there is no /dev/davinci* device", remedy)


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@functools.cache
def _runtime() -> DeviceRuntime:
    from anytron_ascend.runtime import AscendRuntime

    return AscendRuntime()
