"""Read verl's configuration as verl's entry point does, and make the arguments of its engines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from anytron import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SEARCH_PATH = "pkg://verl.trainer.config"
"""Hydra's path of verl's defaults, which a user's file names, for example ``ppo_trainer``."""
ALONE = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": False,
}
"""Parallel sizes for a single rank, by verl's names in ``actor.megatron``."""


def compose(path: Path, overrides: Sequence[str]) -> Any:
    """Compose a configuration with hydra, and return its section ``actor_rollout_ref``.

    Args:
        path: A file that ``python -m verl.trainer.main_ppo --config-path --config-name`` takes.
        overrides: Overrides in hydra's grammar, as on that command line.

    Raises:
        ConfigError: hydra cannot compose the file, or its strategy is not Megatron.
    """
    from hydra import compose as composed
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    try:
        with initialize_config_dir(str(path.resolve().parent), version_base=None):
            whole = composed(path.stem, overrides=[f"hydra.searchpath=[{SEARCH_PATH}]", *overrides])
    except HydraException as error:
        raise ConfigError(
            "verl's configuration cannot be read.",
            where=str(path),
            why=str(error),
            fix="correct the file or the overrides; they are as for python -m verl.trainer.main_ppo",
        ) from error
    section = whole.get("actor_rollout_ref")
    strategy = None if section is None else section.actor.get("strategy")
    if strategy != "megatron":
        raise ConfigError(
            "Only verl's Megatron engine can be verified.",
            where=f"{path}: actor_rollout_ref.actor.strategy",
            why=f"the strategy is {strategy!r}",
            fix="add model_engine=megatron to the overrides, or 'override model_engine: megatron' to the defaults of "
            "the file",
        )
    return section


def model_directory(section: Any) -> Path:
    """Return the Hugging Face directory of the actor; verl downloads it if necessary."""
    from pathlib import Path

    from verl.utils.fs import copy_to_local

    return Path(copy_to_local(section.model.path))


def ranks_of(section: Any) -> int:
    """The smallest number of ranks for the parallel sizes: one data-parallel replica, or more if experts need them."""
    engine = section.actor.megatron
    pipeline, tensor = engine.pipeline_model_parallel_size, engine.tensor_model_parallel_size
    expert_tensor = engine.expert_tensor_parallel_size or tensor
    dense = tensor * pipeline * engine.context_parallel_size
    return math.lcm(dense, engine.expert_model_parallel_size * expert_tensor * pipeline)


def engine_parts(section: Any, *, packed: bool, alone: bool, trains: bool) -> dict[str, Any]:
    """Make the keyword arguments of verl's ``EngineRegistry.new``.

    Args:
        section: Section that :func:`compose` returns; it is not changed.
        packed: Whether sequences are packed (thd) or padded rows (bshd).
        alone: Whether to use one rank instead of the configured parallel sizes.
        trains: Whether to have an optimizer and gradients.
    """
    from omegaconf import OmegaConf, open_dict
    from verl.utils.config import omega_conf_to_dataclass

    actor: Any = OmegaConf.create(OmegaConf.to_container(section.actor, resolve=True))
    with open_dict(actor):
        dtype = actor.megatron.dtype
        actor.megatron.update(ALONE if alone else {})
        # verl accepts 16-bit types only, whose rounding hides faults; the true dtype is set below.
        actor.megatron.update({"forward_only": not trains, "use_remove_padding": packed, "dtype": "bfloat16"})
        actor.optim.update({"lr_decay_steps": 10, "lr_warmup_steps": 0, "total_training_steps": 10})
    engine = omega_conf_to_dataclass(actor.megatron)
    object.__setattr__(engine, "dtype", dtype)
    return {
        "model_config": omega_conf_to_dataclass(section.model),
        "engine_config": engine,
        "optimizer_config": omega_conf_to_dataclass(actor.optim),
        "checkpoint_config": omega_conf_to_dataclass(actor.checkpoint),
    }
