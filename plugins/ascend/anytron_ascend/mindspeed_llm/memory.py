"""The estimate of a run whose engine is ``mindspeed_llm``: ``EngineInfo.memory``. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron import ConfigError
from anytron_ascend.mindspeed_llm.options import MindSpeedLlmOptions

if TYPE_CHECKING:
    from anytron import RunConfig
    from anytron.engines import TrainingEstimate


def estimate(run: RunConfig) -> TrainingEstimate:
    """Estimate as for the engine ``megatron``: tensors, their split, gradients, optimizer and log-probs are the same.

    Raises:
        ConfigError: ``engine.options.recompute`` keeps other activations than that engine would; or the tensors of the
            model are not known before it is built.
    """
    from anytron_megatron import estimate_training

    section = MindSpeedLlmOptions.model_validate(run.engine.options).recompute
    defaults = type(section)()
    if others := [name for name in type(section).model_fields if getattr(section, name) != getattr(defaults, name)]:
        raise ConfigError(
            "There is no estimate of what this run needs.",
            where=", ".join(f"engine.options.recompute.{name}" for name in others),
            why="activations are counted without recomputation or with that of each layer on its own, nothing between",
            fix="examine the run without these options: with engine.recompute=full it needs less than most of them, "
            "with engine.recompute=none more than any",
        )
    return estimate_training(run)
