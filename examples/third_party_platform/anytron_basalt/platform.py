"""The Basalt platform: every hook, each as short as it can be. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron import (
    Availability,
    ConfigEdit,
    Decision,
    Diagnostic,
    Feature,
    Limit,
    ModelTraits,
    Platform,
    Probe,
    Requirement,
    hookimpl,
)
from anytron.sequences import AttnMask, MaskKind
from anytron_basalt.options import BasaltOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pydantic import BaseModel
    from torch import Tensor

    from anytron import DeviceRuntime, LayoutRequest, Patch, Phase, ProcessInfo, RunConfig
    from anytron.kernels import AttentionKernel, AttentionSpec, KernelName, LogProbKernel, LogProbSpec
    from anytron.sequences import LayoutConstraints, MaskRequest, ModelInputs, SequenceLayout

DEVICE = Path("/dev/basalt0")


class BasaltPlatform(Platform):
    """Basalt accelerators, through their vendor's library."""

    name = "basalt"
    api_version = 1
    options_model = BasaltOptions
    visible_devices_variable = "BASALT_VISIBLE_DEVICES"
    environment_prefixes = ("BASALT_",)
    ray_resource = "BASALT"

    def __init__(self) -> None:
        self.options = BasaltOptions()

    def probe(self) -> Probe:
        """Ask the vendor's library how many devices its driver reports."""
        try:
            import basalt_sdk
        except ImportError as error:
            found = Availability.BROKEN if DEVICE.exists() else Availability.ABSENT
            return Probe(found, f"basalt_sdk cannot be imported: {error}", "pip install basalt-sdk")
        try:
            devices = basalt_sdk.device_count()
        except basalt_sdk.DriverError as error:
            return Probe(Availability.BROKEN, str(error), "reload the driver: modprobe basalt")
        if not devices:
            return Probe(Availability.ABSENT, "the driver reports no device", "set BASALT_DEVICES=1 for the simulator")
        return Probe(Availability.USABLE, f"the driver reports {devices}", devices=devices)

    def runtime(self) -> DeviceRuntime:
        """The device: one object per process."""
        return _runtime()

    def configure_options(self, options: BaseModel | None) -> None:
        """Keep the validated ``platform.options``."""
        assert isinstance(options, BasaltOptions)
        self.options = options

    def decisions(self) -> list[Decision]:
        """Return the length of a tile, and why it was chosen."""
        chosen = "tile" in self.options.model_fields_set
        reason = "platform.options.tile says so" if chosen else "its vendor's own programs use it"
        return [Decision("tile", str(self.options.tile), reason)]

    def limits(self) -> list[Limit]:
        """Return what Basalt's kernels lack, and what the simulator lacks: a device's own memory and arithmetic."""
        return [
            Limit(Feature.OWN_DEVICE, "the simulator computes on the host's processor"),
            Limit(Feature.COMPANY_INVARIANCE, "its sums depend on lengths, and no other kernel knows its mode"),
        ]

    def layout_constraints(self, request: LayoutRequest) -> LayoutConstraints:
        """Pad each sequence to whole tiles."""
        from anytron.sequences import LayoutConstraints

        del request
        return LayoutConstraints(align=self.options.tile)

    @hookimpl
    def requirements(self) -> list[Requirement]:
        """Return the vendor's library, which must be installed."""
        return [Requirement("basalt-sdk", ">=1.2,<2", "pip install 'basalt-sdk>=1.2,<2'")]

    @hookimpl
    def configure(self, config: RunConfig) -> Iterator[ConfigEdit | Diagnostic]:
        """Fit micro-batches into the memory, generate with plain attention, and refuse sequences that are too long."""
        from basalt_sdk import LONGEST_SEQUENCE

        if config.engine.max_tokens_per_micro_batch > self.options.memory_tokens:
            yield ConfigEdit(
                "engine.max_tokens_per_micro_batch", self.options.memory_tokens, "Basalt's memory holds no more tokens"
            )
        if config.rollout.engine == "transformers" and not config.supervised:
            reason = "Basalt's compiler knows no fused attention"
            yield ConfigEdit("rollout.options.attn_implementation", "eager", reason, default=True)
        if config.rollout.max_new_tokens >= LONGEST_SEQUENCE:
            yield Diagnostic(
                "error",
                "rollout.max_new_tokens",
                f"Basalt numbers the positions of a sequence with 15 bits: {LONGEST_SEQUENCE} tokens, prompt included",
                f"set it below {LONGEST_SEQUENCE}",
            )

    @hookimpl
    def runtime_env(self, process: ProcessInfo) -> dict[str, str]:
        """Set the tile in the library of each training rank; versions before 1.3 also need the patch."""
        return {"BASALT_TILE": str(self.options.tile)} if process.role == "trainer" else {}

    @hookimpl
    def patch_model(self, phase: Phase) -> list[Patch]:
        """Return the patches of a phase (:mod:`anytron_basalt.patches`)."""
        from anytron_basalt.patches import PATCHES

        return [patch for patch in PATCHES if patch.phase is phase]

    @hookimpl
    def preprocess_sequences(self, inputs: ModelInputs) -> ModelInputs:
        """Set the real lengths in the library while this micro-batch runs."""
        import basalt_sdk

        from anytron.sequences import scopes

        lengths = inputs.layout.lengths.tolist()

        @contextlib.contextmanager
        def scope() -> Iterator[None]:
            before = basalt_sdk.set_lengths(lengths)
            try:
                yield
            finally:
                basalt_sdk.set_lengths(before)

        return replace(inputs, scope=scopes.combine(inputs.scope, scope))

    @hookimpl
    def build_attn_mask(self, request: MaskRequest) -> AttnMask | None:
        """Return a mask without a tensor for packed causal sequences, whose lengths the library has.

        None = Anytron's default mask.
        """
        whole_sequences = request.format == "thd" and request.parallel.context == 1
        if whole_sequences and MaskKind.NONE in request.accepted and request.traits == ModelTraits():
            from anytron_basalt.attention import LENGTHS

            return AttnMask(MaskKind.NONE, LENGTHS)
        return None

    @hookimpl
    def postprocess_output(self, values: Tensor, layout: SequenceLayout) -> Tensor | None:
        """Unpack the output of a rank that has whole sequences; None = Anytron's default, which gathers their parts."""
        return layout.unpack(values) if layout.shard.size == 1 else None

    @hookimpl
    def attention_kernel(self, spec: AttentionSpec) -> AttentionKernel:
        """Return Basalt's kernel for every layer: no other kernel knows the mode that ``build_attn_mask`` returns."""
        from anytron_basalt.attention import BasaltAttention

        return BasaltAttention(spec, self.options.tile)

    @hookimpl
    def fused_kernel(self, name: KernelName) -> Callable[..., Any] | None:
        """Return Basalt's RMS norm or SwiGLU; None = Anytron's default kernel."""
        from anytron_basalt.fused import KERNELS

        return KERNELS.get(name)

    @hookimpl
    def log_prob_kernel(self, spec: LogProbSpec) -> LogProbKernel | None:
        """Return Basalt's kernel if the vocabulary is on one rank; None = Anytron's default kernel."""
        from anytron_basalt.log_probs import make_log_probs

        return make_log_probs(spec)


@functools.cache
def _runtime() -> DeviceRuntime:
    from anytron_basalt.runtime import BasaltRuntime

    return BasaltRuntime()
