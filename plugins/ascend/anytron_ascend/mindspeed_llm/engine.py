"""The training engine ``mindspeed_llm``: the engine of Megatron, over MindSpeed-LLM's models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron_ascend.mindspeed_llm.models import MindSpeedLlmSource
from anytron_megatron.engine import MegatronEngine

if TYPE_CHECKING:
    from pathlib import Path


class MindSpeedLlmEngine(MegatronEngine):
    """Train one policy, and the critic of PPO, as models of MindSpeed-LLM; score tokens.

    Its arguments are installed by the adaptor as the platform prepares the engine
    (:class:`anytron_ascend.adaptors.mindspeed_llm.MindSpeedLlmAdaptor`).
    """

    def open_source(self, directory: Path, *, policy: bool) -> MindSpeedLlmSource:
        """Open a model directory; the policy's and the critic's are alike."""
        del policy
        return MindSpeedLlmSource(directory, getattr(torch, self._context.config.model.dtype))
