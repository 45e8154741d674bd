"""Save the models that a run has trained, in the formats that others read: at its end, and from a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.files import publish_directory
from anytron.run.trainer.initial_model import write_random_model
from anytron.run.trainer.workers import start_training
from anytron.task.data.pretrained import load_tokenizer, save_generation_config, save_processor

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from anytron.config.schema import RunConfig
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.task.data.beginning import Beginning
    from anytron.workers.executor.protocol import Executor


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


def export_checkpoint(
    config: RunConfig, executor: Executor, training: Path, out: Path, beginning: Beginning | None = None
) -> None:
    """Write the policy of a checkpoint as a Hugging Face directory with tokenizer and image processor.

    Args:
        config: The run that the checkpoint is of, in the parallel layout to load it with.
        executor: Starts the training ranks; the caller closes it.
        training: The training engine's files of the checkpoint.
        out: The directory to write.
        beginning: What the run began with: its chat template goes with the tokenizer; None = the tokenizer's own.
    """
    tokenizer = load_tokenizer(config.model)
    if beginning is not None:
        tokenizer.chat_template = beginning.chat_template
    write_random_model(config, tokenizer)
    trainer = start_training(executor, config)
    trainer.load_checkpoint(str(training))
    out.parent.mkdir(parents=True, exist_ok=True)
    publish_directory(out, lambda directory: save_model(config, trainer, tokenizer, directory))
