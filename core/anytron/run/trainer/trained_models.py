"""Save what a run has trained, in the formats that others read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.files import publish_directory
from anytron.task.data.pretrained import save_generation_config, save_processor

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from anytron.config.schema import RunConfig
    from anytron.run.trainer.workers import TrainingWorkers


MODEL, ADAPTER, CRITIC = "hf", "adapter", "critic"
"""Names, in the run's directory, of what it has trained."""


def save_trained_models(
    config: RunConfig, trainer: TrainingWorkers, tokenizer: PreTrainedTokenizerBase, path: Path
) -> None:
    """Write ``hf/`` and, where the run has them, ``adapter/`` and ``critic/``; each appears when it is complete.

    Args:
        config: The run.
        trainer: The training engine.
        tokenizer: Written beside the weights, as the image processor is.
        path: The run's directory.
    """

    def critic(directory: Path) -> None:
        trainer.save_critic(str(directory))
        tokenizer.save_pretrained(directory)

    publish_directory(path / MODEL, lambda directory: save_model(config, trainer, tokenizer, directory))
    if config.model.lora is not None:
        publish_directory(path / ADAPTER, lambda directory: trainer.save_adapter(str(directory)))
    if config.critic is not None:
        publish_directory(path / CRITIC, critic)


def save_model(
    config: RunConfig, trainer: TrainingWorkers, tokenizer: PreTrainedTokenizerBase, directory: Path
) -> None:
    """Write the policy as a Hugging Face directory with tokenizer and image processor."""
    trainer.save_hf(str(directory))
    tokenizer.save_pretrained(directory)
    save_processor(config.model, directory)
    save_generation_config(config.model, directory)
