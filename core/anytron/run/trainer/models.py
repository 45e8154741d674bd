"""The models in a run's directory: the initial model, and the trained ones."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.base.errors import ConfigError
from anytron.base.files import publish_directory
from anytron.task.data.examination import examined
from anytron.task.data.pretrained import (
    load_tokenizer,
    model_class,
    save_generation_config,
    save_processor,
    save_speakers,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from anytron.config.schema import RunConfig
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.task.data.beginning import Beginning
    from anytron.workers.executor.protocol import Executor

INITIAL_MODEL = "initial_model"
"""Name, in the run's directory, of a model that was made from ``model.config``."""
MODEL, ADAPTER, CRITIC = "hf", "adapter", "critic"
"""Names, in the run's directory, of the trained policy, adapters and critic."""


def model_directory(config: RunConfig) -> Path:
    """Return the directory of the initial model: ``model.path``, or what :func:`write_random_model` writes."""
    if config.model.path is not None:
        return Path(config.model.path)
    return Path(config.trainer.output_dir).resolve() / INITIAL_MODEL


def write_random_model(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, draw: Callable[[PreTrainedModel], None] | None = None
) -> None:
    """Write a model of ``model.config`` with random weights, unless it exists or ``model.path`` is set.

    The weights follow from ``trainer.seed`` alone, so that every parallel layout and every platform
    starts from the same ones.

    Args:
        config: The run's configuration.
        tokenizer: Written beside the weights, as the image processor is.
        draw: Changes the initial weights of the model, with torch's generator.

    Raises:
        ConfigError: transformers refuses the configuration, or the tokenizer has more entries than
            the model.
    """
    directory = model_directory(config)
    if config.model.config is None or directory.exists():
        return
    import torch
    from transformers import AutoConfig
    from transformers.utils import logging as hf_logging

    try:
        hf_config = AutoConfig.for_model(**deepcopy(config.model.config))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.trainer.seed)
            dtype = getattr(torch, config.model.dtype)
            model = model_class(hf_config).from_config(hf_config, dtype=dtype)
            draw_padding_rows(model)
            if draw is not None:
                draw(model)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            "The model cannot be created.",
            where="model.config",
            why=f"{type(error).__name__}: {error}",
            fix="set only fields that the Hugging Face config of this model_type has, to values that it allows",
        ) from error
    vocab_size = hf_config.get_text_config().vocab_size
    if len(tokenizer) > vocab_size:
        raise ConfigError(
            "The tokenizer has more tokens than the model's vocabulary.",
            where="model.config.vocab_size",
            why=f"the tokenizer has {len(tokenizer)} tokens, but vocab_size is {vocab_size}",
            fix=f"set vocab_size to {len(tokenizer)} or more",
        )
    # The run has a progress bar of its own.
    hf_logging.disable_progress_bar()

    def write(part: Path) -> None:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        save_processor(config.model, part)

    publish_directory(directory, write)


def save_trained_models(
    config: RunConfig, trainer: TrainingWorkers, tokenizer: PreTrainedTokenizerBase, path: Path
) -> None:
    """Write ``hf/`` and, where the run has them, ``adapter/`` and ``critic/``; each appears when it is complete.

    Args:
        config: The run's configuration.
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
    """Write the policy as a Hugging Face directory with tokenizer and image processor.

    Raises:
        ConfigError: The model's processor or ``generation_config.json`` cannot be read.
    """
    trainer.save_hf(str(directory))
    tokenizer.save_pretrained(directory)
    save_processor(config.model, directory)
    save_generation_config(config.model, directory)
    save_speakers(config.model, directory)


def export_checkpoint(
    config: RunConfig, executor: Executor, training: Path, out: Path, beginning: Beginning | None = None
) -> None:
    """Write the policy of a checkpoint as a Hugging Face directory with tokenizer and image processor.

    Args:
        config: Configuration of the run that saved the checkpoint, with the parallel layout to load it in.
        executor: Starts the training ranks; the caller closes it.
        training: Directory of the training engine's files in the checkpoint.
        out: The directory to write.
        beginning: The beginning of the run, whose chat template is saved with the tokenizer; None = the tokenizer's own
            template.

    Raises:
        ConfigError: The model's config, tokenizer or processor cannot be read.
    """
    # Engines import this module for model_directory, and need nothing of the loop.
    from anytron.run.trainer.workers import start_training

    with examined(config.model):
        tokenizer = load_tokenizer(config.model)
    if beginning is not None:
        tokenizer.chat_template = beginning.chat_template
    write_random_model(config, tokenizer)
    trainer = start_training(executor, config)
    trainer.load_checkpoint(str(training))
    out.parent.mkdir(parents=True, exist_ok=True)
    publish_directory(out, lambda directory: save_model(config, trainer, tokenizer, directory))


def draw_padding_rows(model: PreTrainedModel) -> None:
    """Initialise the padding token's embedding at random, with transformers' default standard deviation.

    transformers leaves it at zero and never trains it. Megatron does train it, and RMSNorm multiplies the gradient at
    a zero vector by ``1 / sqrt(eps)``: one such row would have nearly all of the first gradient's norm.
    """
    import torch

    deviation = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            with torch.no_grad():
                module.weight[module.padding_idx].normal_(std=deviation)
