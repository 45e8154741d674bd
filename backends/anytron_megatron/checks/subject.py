"""The data about a model of a run that the checks need. Imports no Megatron."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.task.data.model_files import stated_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.config.schema import RunConfig


def models_of(run: RunConfig) -> list[Subject]:
    """List the models of the policy and, if they have their own directories, of critic and teacher."""
    return [one for one in (Subject.policy(run), Subject.critic(run), Subject.teacher(run)) if one is not None]


@dataclass(frozen=True)
class Subject:
    """A model of the run to check: the policy's, the critic's or the teacher's model, or a reward model.

    Attributes:
        key: The configuration key that chose the model: ``model.path``, ``model.config``, ``critic.path``,
            ``teacher.path`` or ``reward_model.path``.
        config: The model's whole Hugging Face config, as :func:`anytron.task.data.model_files.logits_fields` gives it;
            empty if it is missing or malformed, which the core reports.
        path: Directory of its weights; None = random weights.
        scores: Whether it is a reward model, with a head that scores sequences.
    """

    key: str
    config: Mapping[str, Any]
    path: Path | None
    scores: bool = False

    @property
    def text(self) -> Mapping[str, Any]:
        """The config of its language model."""
        text: Mapping[str, Any] = self.config.get("text_config") or self.config
        return text

    @classmethod
    def policy(cls, run: RunConfig) -> Subject:
        """The model that the run trains."""
        if run.model.path is None:
            return cls("model.config", stated_config(None, run.model.config), None)
        return cls._in_directory("model.path", run.model.path)

    @classmethod
    def critic(cls, run: RunConfig) -> Subject | None:
        """The model that the critic starts from; None if there is no critic, or if it starts from the policy's."""
        if run.critic is None or run.critic.path is None:
            return None
        return cls._in_directory("critic.path", run.critic.path)

    @classmethod
    def teacher(cls, run: RunConfig) -> Subject | None:
        """The model that the run learns from; None if there is none."""
        return None if run.teacher is None else cls._in_directory("teacher.path", run.teacher.path)

    @classmethod
    def reward_model(cls, run: RunConfig) -> Subject | None:
        """The model that scores responses; None if there is none."""
        section = run.reward_model
        return None if section is None else replace(cls._in_directory("reward_model.path", section.path), scores=True)

    @classmethod
    def _in_directory(cls, key: str, directory: str) -> Subject:
        return cls(key, stated_config(directory, None), Path(directory))
