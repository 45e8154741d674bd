"""The toy platform: an implementation of every hook."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from anytron import Platform, hookimpl
from anytron.config.diagnostics import Diagnostic
from anytron.hooks.types import ConfigEdit, Requirement
from anytron.kernels.contract import KernelName
from anytron.masks import AttnMask, MaskKind
from anytron.platform import Availability, Decision, Feature, Limit, Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron.hooks.types import LayoutRequest, PatchContext, ProcessInfo
    from anytron.kernels.contract import AttentionKernel, AttentionSpec, LogProbKernel, LogProbSpec
    from anytron.masks import MaskRequest
    from anytron.patches import Patch, Phase
    from anytron.platform import DeviceRuntime
    from anytron.sequences import LayoutConstraints, ModelInputs, SequenceLayout


class ToyOptions(BaseModel):
    """``platform.options`` of the toy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tile: int = 8
    """Tokens in one tile: sequences are padded to multiples of it."""
    memory_tokens: int = 4096
    """Tokens of a micro-batch that fit into the toy's memory."""


class ToyPlatform(Platform):
    """The processor, pretending to be an accelerator."""

    name = "toy"
    options_model = ToyOptions
    visible_devices_variable = "TOY_VISIBLE_DEVICES"
    ray_resource = "TOY"

    def __init__(self) -> None:
        self.options = ToyOptions()

    def probe(self) -> Probe:
        """What ``TOY_DEVICE`` says; absent if it says nothing."""
        availability = Availability(os.environ.get("TOY_DEVICE", "absent"))
        remedy = "" if availability is Availability.USABLE else "set TOY_DEVICE=usable"
        return Probe(availability, f"TOY_DEVICE says {availability.value}", remedy, devices=1)

    def runtime(self) -> DeviceRuntime:
        """The device under the other name."""
        from anytron_cpu import CpuPlatform

        return CpuPlatform().runtime()

    def configure_options(self, options: BaseModel | None) -> None:
        """Keep the options."""
        assert isinstance(options, ToyOptions)
        self.options = options

    def decisions(self) -> list[Decision]:
        """The length of a tile."""
        chosen = "tile" in self.options.model_fields_set
        reason = "platform.options.tile says so" if chosen else "its vendor's own programs use it"
        return [Decision("tile", str(self.options.tile), reason)]

    def limits(self) -> list[Limit]:
        """The processor plays the toy."""
        return [Limit(Feature.OWN_DEVICE, "the processor plays the toy")]

    @hookimpl
    def requirements(self) -> list[Requirement]:
        """torch."""
        return [Requirement("torch", ">=2.6", "pip install torch")]

    @hookimpl
    def configure(self, config: RunConfig) -> Iterator[ConfigEdit | Diagnostic]:
        """Fit micro-batches into the memory; there is no recomputation."""
        if config.engine.max_tokens_per_micro_batch > self.options.memory_tokens:
            yield ConfigEdit(
                "engine.max_tokens_per_micro_batch", self.options.memory_tokens, "the toy's memory is small"
            )
        if config.engine.recompute != "none":
            yield Diagnostic("error", "engine.recompute", "the toy cannot recompute", "engine.recompute=none")

    @hookimpl
    def runtime_env(self, process: ProcessInfo) -> dict[str, str]:
        """Tell each process its tile."""
        return {"TOY_TILE": str(self.options.tile)} if process.role == "trainer" else {}

    @hookimpl
    def patch_model(self, phase: Phase, context: PatchContext) -> list[Patch]:
        """Give the vendor's library the tile of the options."""
        from anytron.patches import Patch, Phase

        if phase is not Phase.BEFORE_BUILD:
            return []
        return [
            Patch(
                id="toy.tile",
                owner=self.name,
                target="anytron_toy.vendor",
                phase=phase,
                reason="the library knows one tile size only",
                install="anytron_toy.vendor_patches:set_tile",
            )
        ]

    @hookimpl
    def layout_constraints(self, request: LayoutRequest) -> LayoutConstraints:
        """Whole tiles."""
        from anytron.sequences import LayoutConstraints

        return LayoutConstraints(align=self.options.tile)

    @hookimpl
    def preprocess_sequences(self, inputs: ModelInputs) -> ModelInputs:
        """Tell the vendor's library the real lengths, as long as this micro-batch runs."""
        from anytron.sequences import scopes
        from anytron_toy import vendor

        lengths = inputs.layout.lengths.tolist()

        @contextlib.contextmanager
        def scope() -> Iterator[None]:
            before = vendor.set_actual_lengths(lengths)
            try:
                yield
            finally:
                vendor.set_actual_lengths(before)

        return replace(inputs, scope=scopes.combine(inputs.scope, scope))

    @hookimpl
    def build_attn_mask(self, request: MaskRequest) -> AttnMask | None:
        """No tensor in thd: the library has the lengths. The rest is left to the neutral default."""
        plain = request.traits == type(request.traits)() and request.parallel.context == 1
        if request.format == "thd" and MaskKind.NONE in request.accepted and plain:
            from anytron_toy.kernels import LENGTHS

            return AttnMask(MaskKind.NONE, LENGTHS)
        return None

    @hookimpl
    def postprocess_output(self, values: Tensor, layout: SequenceLayout) -> Tensor | None:
        """Unpack where nothing has to be gathered."""
        return layout.unpack(values) if layout.shard.size == 1 else None

    @hookimpl
    def attention_kernel(self, spec: AttentionSpec) -> AttentionKernel:
        """Plain attention, one sequence after the other; the rest is the neutral kernel's, which must read our mode."""
        from anytron.kernels.attention import make_attention
        from anytron_toy.kernels import LoopedAttention, read_toy_mode

        plain = spec.traits.window is None and not spec.sinks and spec.dropout == 0.0
        return LoopedAttention(spec) if plain else read_toy_mode(make_attention(spec))

    @hookimpl
    def fused_kernel(self, name: KernelName) -> Callable[..., Any] | None:
        """SwiGLU."""
        from anytron_toy.kernels import swiglu

        return swiglu if name is KernelName.SWIGLU else None

    @hookimpl
    def log_prob_kernel(self, spec: LogProbSpec) -> LogProbKernel | None:
        """All logits at once, where the vocabulary is on one rank."""
        from anytron_toy.kernels import log_probs

        return partial(log_probs, spec.vocab_size) if spec.tensor_parallel == 1 else None

    @hookimpl
    def rollout_options(self, engine: str) -> dict[str, Any]:
        """Options of the toy's own rollout engine."""
        return {"tile": self.options.tile} if engine == "toy" else {}
