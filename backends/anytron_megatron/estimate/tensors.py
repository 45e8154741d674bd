"""The tensors of a model, without building it, and the number of elements of each on a rank.

Names and shapes are Hugging Face's, from the model's family or from the headers of its files. Column-parallel layers
are split by outputs and row-parallel ones by inputs (Shoeybi et al., arXiv:1909.08053, 3); all other layers are on
every tensor-parallel rank. Layers go to pipeline stages in order, or in turns if there are several chunks on each rank
(Narayanan et al., arXiv:2104.04473, 2.2).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anytron.base.errors import ConfigError
from anytron.task.data.model_files import CHOSEN_EXPERTS, EXPERT_COUNTS, read_config, tensor_names
from anytron.task.data.weight_headers import DamagedFileError, read_header
from anytron_megatron.lora.names import ALL_LINEAR, LAYERS
from anytron_megatron.models.families import family_of
from anytron_megatron.models.weight_names import (
    may_stay_unread,
    prediction_tensors,
    with_score_head,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path
    from typing import Any

    from anytron.base.traits import ParallelSizes
    from anytron.config.schema import LoraSection
    from anytron_megatron.checks.subject import Subject
    from anytron_megatron.models.weight_names import Shapes


COPIES = (".embed_tokens.weight", ".shared_head.head.weight")
"""Endings of tensors that multi-token prediction modules have in files, but share with the model once it is built."""

BUFFERS = ("e_score_correction_bias",)
"""Tensors that are not parameters: no gradient, and float32 whatever the model's element type."""

HEADS = ("lm_head", "score")
"""Names of layers behind the last: of a language model, and of a classifier."""

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

TOWERS = re.compile(
    r"(?:^|\.)(?:visual|vision_tower|vision_model|multi_modal_projector|merger|embed_vision|audio_tower|embed_audio)\."
)
"""Names of the parts of a model before its language model: towers of images and sound, and what joins them to it."""

COLUMN = frozenset({
    "q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "in_proj_qkvz", "in_proj_ba",
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "gate_up_proj",
})  # fmt: skip

ROW = frozenset({"o_proj", "down_proj", "out_proj"})

BY_HEAD = frozenset({"A_log", "dt_bias", "sinks"})

GROUPED = frozenset({"k_proj", "v_proj"})
"""Layers of keys and values, replicated if there are fewer key/value heads than tensor-parallel ranks."""

_SECOND = frozenset({"k_proj", "v_proj", "up_proj"})
"""Layers whose adapter has no ``A``: it shares the ``A`` of another layer (``q_proj`` or ``gate_proj``)."""


@dataclass(frozen=True)
class Piece:
    """The part of a tensor on a rank.

    Attributes:
        name: Hugging Face's name.
        shape: Shape of the whole tensor.
        size: Number of elements on the rank.
        stage: Pipeline stage.
        expert: Whether it belongs to a routed expert, which has other data-parallel replicas than dense layers.
        layer: Number of its transformer layer; None = it is in no layer.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    stage: int
    expert: bool
    layer: int | None

    @property
    def kind(self) -> str:
        """The Hugging Face layer: ``q_proj``, ``embed_tokens``, ..."""
        return kind_of(self.name)


def model_shapes(subject: Subject, *, predicts_ahead: bool) -> Shapes:
    """List the parameters of a model.

    Args:
        subject: The model, with its config and the directory of its weights.
        predicts_ahead: Whether to include multi-token prediction modules, whose tensors are known from files only.

    Raises:
        ConfigError: The model's config cannot be read; or the tensors of its family are unknown, and there are no
            weight files.
    """
    if subject.path is not None and not subject.config:
        read_config(subject.path)  # says why there is none
    family = family_of(subject.config)
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
            why=f"Anytron has no list of tensors for the family {subject.config.get('model_type')!r}, or the config "
            "lacks sizes",
            fix=f"set {'model.path' if subject.path is None else subject.key} to a directory with safetensors files, "
            "whose headers list the tensors",
        )
    return {name: shape for name, shape in shapes.items() if not name.endswith(BUFFERS)}


def pieces(shapes: Shapes, config: Mapping[str, Any], sizes: ParallelSizes) -> Iterator[Piece]:
    """Yield the part of each parameter on a rank, with its pipeline stage.

    Args:
        shapes: Shapes of all parameters of the whole model.
        config: The Hugging Face config of the language model.
        sizes: The parallel sizes.
    """
    layers = config.get("num_hidden_layers", 1)
    chunk = max(1, math.ceil(layers / (sizes.pipeline * sizes.virtual_pipeline)))
    last, untied = sizes.pipeline - 1, any(kind_of(name) in HEADS for name in shapes)
    for name, shape in shapes.items():
        vision, layer = TOWERS.search(name) is not None, LAYER.search(name)
        number = None if vision or layer is None else int(layer[1])
        expert = ".experts." in name
        size = math.prod(shape) if vision else _size(name, shape, config, sizes, expert=expert)
        if number is not None:
            stage = last if number >= layers else number // chunk % sizes.pipeline
        else:
            stage = 0 if vision or kind_of(name) == "embed_tokens" else last
        yield Piece(name, shape, size, stage, expert, number)
        if kind_of(name) == "embed_tokens" and sizes.pipeline > 1 and not untied:
            yield Piece(name, shape, size, last, expert=False, layer=None)  # tied, and used at both ends


def adapter_pieces(layers: Iterable[Piece], lora: LoraSection) -> list[Piece]:
    """Estimate the adapters of a rank's layers; neither ``A`` nor ``B`` counts as split over tensor-parallel ranks."""
    wanted = [one.rpartition(".")[2] for one in lora.targets]
    kinds = {kind for name, several in LAYERS.items() if ALL_LINEAR in wanted or name in wanted for kind in several}
    found = []
    for piece in layers:
        if piece.layer is None or len(piece.shape) < 2 or piece.kind not in kinds or piece.name.endswith(".bias"):
            continue
        part = piece.size / max(1, math.prod(piece.shape))
        size = lora.rank * (piece.shape[-2] + (0 if piece.kind in _SECOND else piece.shape[-1]))
        matrices = piece.shape[0] if len(piece.shape) == 3 else 1
        found.append(replace(piece, size=int(size * matrices * (part if piece.expert else 1.0))))
    return found


def kind_of(name: str) -> str:
    """Return the name of a tensor's layer: ``q_proj`` for ``layers.0.self_attn.q_proj.weight``.

    A tensor whose name ends with neither ``weight`` nor ``bias`` is its own layer: ``A_log`` for ``...A_log``.
    """
    *_, before, last = ["", *name.split(".")]
    return before if last in ("weight", "bias") else last


def chosen_share(config: Mapping[str, Any]) -> float:
    """Return the share of a layer's routed experts that process a token; 1 for a dense model."""
    experts, chosen = (
        next((config[name] for name in names if config.get(name)), 1) for names in (EXPERT_COUNTS, CHOSEN_EXPERTS)
    )
    return float(chosen / experts)


def _in_files(directory: Path) -> Shapes:
    shapes: Shapes = {}
    inner = tensor_names(directory).inner
    try:
        for file in sorted(directory.glob("*.safetensors")):
            shapes |= {own: shape for name, shape in read_header(file).items() if (own := inner(name)) is not None}
    except DamagedFileError as error:
        raise ConfigError(
            "The weights cannot be read.", where=str(directory), why=str(error), fix="complete the download"
        ) from error
    return shapes


def _size(name: str, shape: tuple[int, ...], config: Mapping[str, Any], sizes: ParallelSizes, *, expert: bool) -> int:
    count, kind = math.prod(shape), kind_of(name)
    split = kind in COLUMN or kind in BY_HEAD or (kind in ROW and not name.endswith(".bias"))
    if expert:
        return count // (sizes.expert * (sizes.expert_tensor if split else 1))
    if kind in ("embed_tokens", "lm_head"):
        return math.ceil(shape[0] / sizes.tensor) * math.prod(shape[1:])  # Megatron fills the vocabulary up
    if not split:
        return count
    groups = config.get("num_key_value_heads") or sizes.tensor
    return count // (min(groups, sizes.tensor) if kind in GROUPED else sizes.tensor)
