"""Take the model out of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.files import publish_directory
from anytron.run.trainer.initial_model import write_random_model
from anytron.run.trainer.trained_models import save_model
from anytron.run.trainer.workers import start_training
from anytron.task.data.pretrained import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from anytron.config.schema import RunConfig
    from anytron.task.data.beginning import Beginning
    from anytron.workers.executor.protocol import Executor


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
