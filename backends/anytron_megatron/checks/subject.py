"""A model that a run trains, as the checks see it. Imports no Megatron."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.config.schema import RunConfig


@dataclass(frozen=True)
class Subject:
    """The policy's model, or the critic's.

    Attributes:
        key: The configuration key that chose the model: ``model.path``, ``model.config`` or ``critic.path``.
        config: Its Hugging Face config, whole; empty if its directory has none, which the core reports.
        path: Directory of its weights; None = they are random.
    """

    key: str
    config: Mapping[str, Any]
    path: Path | None

    @property
    def text(self) -> Mapping[str, Any]:
        """The config of the language model in it."""
        text: Mapping[str, Any] = self.config.get("text_config", self.config)
        return text

    @classmethod
    def policy(cls, run: RunConfig) -> Subject:
        """The model that the run trains."""
        if run.model.path is None:
            return cls("model.config", run.model.config or {}, None)
        return cls._in_directory("model.path", run.model.path)

    @classmethod
    def critic(cls, run: RunConfig) -> Subject | None:
        """The model that the critic starts from; None if there is no critic, or if it starts from the policy's."""
        if run.critic is None or run.critic.path is None:
            return None
        return cls._in_directory("critic.path", run.critic.path)

    @classmethod
    def _in_directory(cls, key: str, directory: str) -> Subject:
        file = Path(directory) / "config.json"
        return cls(key, json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}, Path(directory))
