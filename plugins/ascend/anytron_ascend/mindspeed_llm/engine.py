"""The training engine ``mindspeed_llm``: the engine of Megatron, over MindSpeed-LLM's models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.engines import load_hf_config
from anytron_ascend.mindspeed_llm.arguments import translate
from anytron_ascend.mindspeed_llm.models import MindSpeedLlmSource
from anytron_ascend.mindspeed_llm.options import MindSpeedLlmOptions
from anytron_ascend.mindspeed_llm.process_state import install_arguments
from anytron_megatron import MegatronEngine

if TYPE_CHECKING:
    from pathlib import Path


class MindSpeedLlmEngine(MegatronEngine):
    """Train one policy, and the critic of PPO, as models of MindSpeed-LLM; score tokens."""

    def prepare_platform(self) -> None:
        """Install the whole run's arguments, which are MindSpeed-LLM's as well, and let it patch for them."""
        config = self._context.config
        options = MindSpeedLlmOptions.model_validate(config.engine.options)
        model = load_hf_config(config.model)
        install_arguments(translate(config, model, options), self._context.layer.ledger)

    def open_source(self, directory: Path, *, policy: bool) -> MindSpeedLlmSource:
        """Open a model directory; the policy's and the critic's are alike."""
        del policy
        return MindSpeedLlmSource(directory, getattr(torch, self._context.config.model.dtype))
