"""The logits that a training engine's are compared with, and where they were computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.base.errors import ResourceError
from anytron.proof.verification.engines import WHOLE_LOGITS, first_sequences
from anytron.proof.verification.hugging_face import computed_by_transformers, expected_logits
from anytron.run.trainer.models import model_directory

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig
    from anytron.device.platform import Platform
    from anytron.proof.verification.engines import Engines, Trajectories


def logits_of_transformers(
    config: RunConfig, platform: Platform, engines: Engines, trajectories: Trajectories
) -> tuple[torch.Tensor, str]:
    """Compute the logits of the first sequences with transformers, without Megatron and the platform's patches.

    An accelerator that computes attention wrongly would compute it wrongly in both engines. So its logits are compared
    with those of the host, in float32, if the host has the memory for the model.

    Args:
        config: Configuration of the run.
        platform: The active platform.
        engines: The rollout engine among them computes the logits where the device is the host.
        trajectories: Sequences to compute.

    Returns:
        Logits, float32 ``[T, V]``, and a description of the place, for the result's detail. No full stop.
    """
    place = "transformers in the rollout's process"
    if platform.accelerator:
        directory, batch = model_directory(config), first_sequences(trajectories.batch)
        try:
            with computed_by_transformers(directory):
                return expected_logits(directory, getattr(torch, config.model.dtype), batch), "transformers on the host"
        except ResourceError as error:
            place += f" on the device, whose faults may be in both ({error.what})"
    return torch.cat(engines.rollout().logits(trajectories.sequences[:WHOLE_LOGITS])), place
