"""Compute the expected logits of the check ``hf-logits``, and describe where they were computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.base.errors import EngineError, ResourceError
from anytron.device.platform import Feature
from anytron.proof.verification.engines import WHOLE_LOGITS, first_sequences
from anytron.proof.verification.hugging_face import computed_by_transformers, expected_logits
from anytron.run.preflight.limits import asked_by_model
from anytron.run.trainer.models import model_directory

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig
    from anytron.device.platform import Platform
    from anytron.proof.verification.engines import Engines, Trajectories


ON_THE_HOST = "transformers on the host"


def logits_of_transformers(
    config: RunConfig, platform: Platform, engines: Engines, trajectories: Trajectories
) -> tuple[torch.Tensor, str]:
    """Compute the logits of the first sequences without Megatron and the platform's patches.

    An accelerator that computes attention wrongly would compute it wrongly in both engines. So its logits are compared
    with those that transformers computes on the host in float32. This is not possible if the host lacks the memory for
    the model, if a run starts from an adapter, which is not in the model's directory, or if a model with experts runs
    in another dtype than float32: its routers would choose other experts on the host.

    Args:
        config: Configuration of the run.
        platform: The active platform.
        engines: Its rollout engine computes the logits if the host does not.
        trajectories: Sequences to compute.

    Returns:
        Logits, float32 ``[T, V]``, and a description of the place, for the result's detail. No full stop.
    """
    obstacle = _obstacle(config)
    if platform.accelerator and not obstacle:
        directory, batch = model_directory(config), first_sequences(trajectories.batch)
        try:
            with computed_by_transformers(directory):
                return expected_logits(directory, getattr(torch, config.model.dtype), batch), ON_THE_HOST
        except (EngineError, ResourceError) as error:
            obstacle = error.what
    place = f"{config.rollout.engine} in the rollout's process"
    if platform.accelerator:
        place += f" on the device, so that faults of the device may not show here; reason: {obstacle}"
    return torch.cat(engines.rollout().logits(trajectories.sequences[:WHOLE_LOGITS])), place


def _obstacle(config: RunConfig) -> str:
    """Say why the host cannot compute logits to compare with; empty if it can."""
    dtype = config.model.dtype
    if config.model.lora is not None and config.model.lora.path is not None:
        return "the run starts from an adapter (model.lora.path)"
    if dtype != "float32" and Feature.MIXTURE_OF_EXPERTS in asked_by_model(config):
        return f"in float32 on the host, routers would choose other experts than in {dtype}"
    return ""
