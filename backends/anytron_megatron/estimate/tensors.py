"""The tensors of a model, by name and shape, without building it: from its family, or from the headers of its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.errors import ConfigError
from anytron_megatron.models.families import FAMILIES
from anytron_megatron.models.weight_files import DamagedFileError, read_header
from anytron_megatron.models.weight_names import may_stay_unread, prediction_tensors, with_score_head

if TYPE_CHECKING:
    from pathlib import Path

    from anytron_megatron.checks.subject import Subject
    from anytron_megatron.models.weight_names import Shapes

COPIES = (".embed_tokens.weight", ".shared_head.head.weight")
"""Of a prediction module in files: the model shares its own."""
BUFFERS = ("e_score_correction_bias",)
"""Tensors that are no parameters: no gradient, and float32 whatever the model's element type."""


def model_shapes(subject: Subject, *, predicts_ahead: bool) -> Shapes:
    """List the parameters of a model.

    Args:
        subject: Its config, and the directory of its weights.
        predicts_ahead: With its multi-token prediction modules, which only files tell.

    Raises:
        ConfigError: Its family's tensors are not known, and there are no files.
    """
    family = FAMILIES.get(subject.config.get("model_type", ""))
    shapes = None if family is None or predicts_ahead else family.tensors(subject.config)
    shapes = with_score_head(shapes) if shapes and subject.scores else shapes
    if shapes is None and subject.path is not None:
        shapes = _in_files(subject.path)
        ahead = prediction_tensors(shapes, subject.text.get("num_hidden_layers", 0))
        unread = {name for name in ahead if not predicts_ahead or name.endswith(COPIES)}
        tied = subject.config.get("tie_word_embeddings", subject.text.get("tie_word_embeddings", False))
        unread |= {name for name in shapes if may_stay_unread(name) or (tied and name == "lm_head.weight")}
        shapes = {name: shape for name, shape in shapes.items() if name not in unread}
    if not shapes:
        raise ConfigError(
            "The tensors of this model cannot be listed before it is built.",
            where=subject.key,
            why=f"the family {subject.config.get('model_type')!r} has no list of tensors, or the config lacks sizes",
            fix="set model.path to a directory with weights: the headers of its files list the tensors",
        )
    return {name: shape for name, shape in shapes.items() if not name.endswith(BUFFERS)}


def _in_files(directory: Path) -> Shapes:
    shapes: Shapes = {}
    try:
        for file in sorted(directory.glob("*.safetensors")):
            shapes |= read_header(file)
    except DamagedFileError as error:
        raise ConfigError("The weights cannot be read.", where=str(directory), why=str(error)) from error
    return shapes
