"""The logits that a training engine's are compared with, and where they were computed."""

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
    with those that transformers computes on the host in float32, if the host has the memory for the model. Models with
    experts are an exception in other dtypes than float32: their routers would choose other experts on the host.

    Args:
        config: Configuration of the run.
        platform: The active platform.
        engines: The rollout engine among them computes the logits in all other cases.
        trajectories: Sequences to compute.

    Returns:
        Logits, float32 ``[T, V]``, and a description of the place, for the result's detail. No full stop.
    """
    place = f"{config.rollout.engine} in the rollout's process"
    if platform.accelerator:
        place += " on the device, so that its faults may be in both"
        if config.model.dtype != "float32" and Feature.MIXTURE_OF_EXPERTS in asked_by_model(config):
            place += f": on the host in float32, routers choose other experts than in {config.model.dtype}"
        else:
            directory, batch = model_directory(config), first_sequences(trajectories.batch)
            try:
                with computed_by_transformers(directory):
                    return expected_logits(directory, getattr(torch, config.model.dtype), batch), ON_THE_HOST
            except (EngineError, ResourceError) as error:
                place += f": {error.what}"
    return torch.cat(engines.rollout().logits(trajectories.sequences[:WHOLE_LOGITS])), place
