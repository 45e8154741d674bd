"""Which checks are about a part of a run that not every run has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.proof.verification.prediction import trains_modules

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig


def absence(check: str, config: RunConfig) -> str | None:
    """Say why a check has nothing to compare in a run; None if it has."""
    critic = config.critic, "the run has no critic"
    part, reason = {
        "multi-token-prediction": (trains_modules(config), "the run trains no multi-token prediction modules"),
        "critic-values": critic,
        "critic-gradients": critic,
        "teacher-log-probs": (config.teacher, "the run has no teacher"),
        "reward-model-scores": (config.reward_model, "the run has no reward model"),
        "adapters-equal-merged": (config.model.lora, "the run trains no adapters (model.lora)"),
    }.get(check, (True, ""))
    return None if part else reason
