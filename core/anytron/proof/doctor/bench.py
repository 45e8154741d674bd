"""What probes work with: a session, its device, and the attention of the model that is examined."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anytron.base.errors import ConfigError
from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.device.platform import Feature, limits_of
from anytron.kernels.contract import AttentionSpec
from anytron.run.preflight.limits import asked_by_model
from anytron.task.data.model_files import read_config

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from anytron.config.schema import RunConfig
    from anytron.device.loading import Session
    from anytron.device.runtime import DeviceRuntime

USUAL = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
"""Attention where no model is known: grouped queries."""
WIDEST = 8
"""Query heads that a probe computes at most: they are all alike."""
WINDOW = 3
"""Tokens that a probe's sliding window has at most: the model's own would hide none of so few."""


@dataclass(frozen=True)
class Bench:
    """A process with a platform.

    Attributes:
        session: The plugins and the platform.
        run: The run that is examined, if any.
    """

    session: Session
    run: RunConfig | None

    @cached_property
    def runtime(self) -> DeviceRuntime:
        """The device; loaded when it is first asked for."""
        runtime = self.session.platform.runtime()
        runtime.set_device(0)
        return runtime

    @cached_property
    def dtype(self) -> torch.dtype:
        """The element type of the run, or bfloat16; float32 where the device or the platform has no bfloat16."""
        wanted = torch.bfloat16 if self.run is None else getattr(torch, self.run.model.dtype)
        assert isinstance(wanted, torch.dtype)
        usable = self.runtime.supports_dtype(wanted) and Feature.BFLOAT16 not in limits_of(self.session.platform)
        return wanted if self.run is not None or usable else torch.float32

    @cached_property
    def model(self) -> Mapping[str, Any]:
        """The Hugging Face config of the language model, or what is usual."""
        if self.run is None:
            return USUAL
        try:
            fields = self.run.model.config or read_config(Path(self.run.model.path or ""))
        except ConfigError:  # topic configuration says so
            return USUAL
        found: Mapping[str, Any] = fields.get("text_config") or fields
        return found if found.get("num_attention_heads") else USUAL

    @cached_property
    def asked(self) -> Collection[Feature]:
        """What the model asks for, as far as its config says so."""
        return () if self.run is None else asked_by_model(self.run)

    @property
    def traits(self) -> ModelTraits:
        """What the mask depends on."""
        latent, window = bool(self.model.get("kv_lora_rank")), None
        if Feature.SLIDING_WINDOW in self.asked:
            window = min(self.model.get("sliding_window") or WINDOW, WINDOW) - 1, 0
        return ModelTraits(causal=True, latent_attention=latent, window=window)

    @property
    def sizes(self) -> ParallelSizes:
        """A probe computes on one rank."""
        return ParallelSizes()

    def attention(self, *, windowed: bool = False) -> AttentionSpec:
        """Give the model's attention on one rank, with as many groups of heads as a probe needs.

        Args:
            windowed: In a layer with a sliding window, if the model has such layers.
        """
        model, tensor = self.model, 1 if self.run is None else self.run.parallel.tensor_model_parallel_size
        heads = max(1, model["num_attention_heads"] // tensor)
        groups = max(1, (model.get("num_key_value_heads") or model["num_attention_heads"]) // tensor)
        if model.get("kv_lora_rank"):
            qk, value, groups = model["qk_nope_head_dim"] + model["qk_rope_head_dim"], model["v_head_dim"], heads
        else:
            qk = value = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        if heads > WIDEST and heads % groups == 0:
            ratio = min(heads // groups, WIDEST)
            groups = max(1, min(groups, WIDEST // ratio))
            heads = groups * ratio
        return AttentionSpec(
            heads,
            groups,
            qk,
            value,
            qk**-0.5,
            self.traits if windowed else replace(self.traits, window=None),
            sinks=Feature.ATTENTION_SINKS in self.asked,
            device_type=self.runtime.device_type,
        )
