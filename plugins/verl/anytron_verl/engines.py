"""verl's own Megatron engines, with the device stack's phases around them and Anytron's layouts inside."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from verl.utils import tensordict_utils
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron import MegatronEngineWithLMHead, MegatronEngineWithValueHead

from anytron import EngineFacts, Feature, ParallelSizes, Patch, Phase
from anytron.train import features_asked
from anytron_megatron import features_of, traits_of
from anytron_verl import PLATFORM, SUPPORTED, process
from anytron_verl.layouts import Layouts, current_micro_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.sequences import Format


UTIL = "verl.models.mcore.util"


def _patch(function: str, reason: str) -> Patch:
    return Patch(
        id=f"verl.{function.replace('_', '-')}",
        owner="verl",
        target=f"{UTIL}:{function}",
        phase=Phase.AFTER_BUILD,
        package="verl",
        requires=SUPPORTED,
        reason=reason,
        remove_when="verl asks its platform for layouts and masks",
        replacement=f"anytron_verl.layouts:{function}",
    )


_THD = (
    "verl indexes jagged tensors row by row, which costs the square of the rows, and sets MindSpeed's globals on NPUs"
)
_BSHD = "verl makes a mask of all pairs of tokens on NPUs, once for each tensor, and pads row by row"
_BACK = "verl cuts the output row by row, and reads lengths from the mask"
PATCHES = (
    _patch("preprocess_thd_engine", _THD),
    _patch("postprocess_thd_engine", _BACK),
    _patch("preprocess_bshd_engine", _BSHD),
    _patch("postprocess_bshd_engine", _BACK),
)
"""Applied together with the device stack's own patches of the phase. Outside of the forward passes of this module's
engines, the replacements call verl's functions."""

logger = logging.getLogger(__name__)


def register(device_name: str) -> None:
    """Register the engines, once, for the vendor of :class:`anytron_verl.device.AnytronDevice`."""
    for model_type, engine in (("language_model", LanguageModelEngine), ("value_model", ValueModelEngine)):
        registered = EngineRegistry._engines[model_type]["megatron"]
        if (device_name, PLATFORM) not in registered:
            EngineRegistry.register(model_type, "megatron", device_name, PLATFORM)(engine)
            process.at_stop(registered.pop, (device_name, PLATFORM), None)


class _OnTheStack:
    """Base class that precedes one of verl's engines, and runs the device stack's phases around the engine's steps."""

    engine_config: Any
    model_config: Any
    tf_config: Any
    module: list[torch.nn.Module]

    def __init__(self, *args: Any, engine_config: Any, **kwargs: Any) -> None:
        stack = process.stack()
        stack.prepare(EngineFacts(sizes_of(engine_config), deterministic=engine_config.full_determinism))
        stack.apply_phase(Phase.BEFORE_PARALLEL_INIT)
        super().__init__(*args, engine_config=engine_config, **kwargs)  # type: ignore[call-arg]  # of verl's engine
        self._layouts: Layouts | None = None

    def initialize(self) -> None:
        """Build the model between the device stack's phases, and its layouts."""
        stack = process.stack()
        stack.apply_phase(Phase.BEFORE_BUILD)
        super().initialize()  # type: ignore[misc]
        stack.apply_phase(Phase.AFTER_BUILD, PATCHES)
        process.write_report()
        if hasattr(self.model_config.hf_config, "vision_config"):
            asked = features_asked(traits_of(self.tf_config), sizes_of(self.engine_config))
            stack.require([Feature.VISION, *asked, *features_of(self.tf_config)])
            logger.warning("verl's own layouts are used: Anytron's do not support images in verl's models")
            return
        sequence_format: Format = "thd" if self.engine_config.use_remove_padding else "bshd"
        self._layouts = Layouts(stack, self.tf_config, sequence_format, sizes_of(self.engine_config))
        self._layouts.settle(self.module)

    def forward_step(self, batch_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch's forward pass with its layout, in its scope."""
        batch = next(batch_iter)
        again = iter((batch,))
        if self._layouts is None:
            return super().forward_step(again, *args, **kwargs)  # type: ignore[misc]
        rows = tensordict_utils.get_non_tensor_data(batch, key="forced_max_seqlen", default=None)
        packed = self.engine_config.pad_to_length and self.engine_config.use_remove_padding
        bucket = self.engine_config.pad_to_length_bucket if packed else None
        with current_micro_batch(self._layouts.prepare(batch["input_ids"], bucket=bucket, rows=rows)):
            return super().forward_step(again, *args, **kwargs)  # type: ignore[misc]


class LanguageModelEngine(_OnTheStack, MegatronEngineWithLMHead):  # type: ignore[misc]
    """verl's engine for policies and their references."""


class ValueModelEngine(_OnTheStack, MegatronEngineWithValueHead):  # type: ignore[misc]
    """verl's engine for critics."""


def sizes_of(engine_config: Any) -> ParallelSizes:
    """Read the parallel sizes of verl's ``McoreEngineConfig``; the remaining ranks are data-parallel replicas."""
    tensor = engine_config.tensor_model_parallel_size
    expert_tensor = engine_config.expert_tensor_parallel_size
    sizes = ParallelSizes(
        tensor=tensor,
        pipeline=engine_config.pipeline_model_parallel_size,
        context=engine_config.context_parallel_size,
        expert=engine_config.expert_model_parallel_size,
        expert_tensor=tensor if expert_tensor is None else expert_tensor,
        virtual_pipeline=engine_config.virtual_pipeline_model_parallel_size or 1,
        sequence_parallel=engine_config.sequence_parallel and tensor > 1,
    )
    replicas = torch.distributed.get_world_size() // sizes.model
    return ParallelSizes(**{**vars(sizes), "data": replicas})
