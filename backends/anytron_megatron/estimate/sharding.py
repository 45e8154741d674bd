"""How many numbers of each tensor lie on a rank: Megatron's ways to split a model, by Hugging Face names.

Column-parallel layers are split by outputs and row-parallel ones by inputs (Shoeybi et al., arXiv:1909.08053, 3);
what is neither is on every tensor-parallel rank. Layers go to pipeline stages in order, or in turns if there are
several chunks on each rank (Narayanan et al., arXiv:2104.04473, 2.2).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anytron_megatron.models.weight_names import LM_HEAD, SCORE_HEAD

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from anytron.base.traits import ParallelSizes
    from anytron_megatron.models.weight_names import Shapes

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
VISION = re.compile(r"(?:^|\.)(?:visual|vision_tower|vision_model)\.")
COLUMN = frozenset({
    "q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "in_proj_qkvz", "in_proj_ba",
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "gate_up_proj",
})  # fmt: skip
ROW = frozenset({"o_proj", "down_proj", "out_proj"})
BY_HEAD = frozenset({"A_log", "dt_bias", "sinks"})
GROUPED = frozenset({"k_proj", "v_proj"})
"""Replicated where there are fewer heads of keys and values than ranks."""


@dataclass(frozen=True)
class Piece:
    """What a rank has of a tensor.

    Attributes:
        name: Hugging Face's name.
        shape: Of the whole tensor.
        size: Numbers on the rank.
        stage: Pipeline stage.
        expert: It belongs to a routed expert, whose replicas are others.
        layer: The transformer layer; None = it is in none.
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


def kind_of(name: str) -> str:
    """Give the last part of a name that is not ``weight`` or ``bias``."""
    *_, before, last = ["", *name.split(".")]
    return before if last in ("weight", "bias") else last


def pieces(shapes: Shapes, config: Mapping[str, Any], sizes: ParallelSizes) -> Iterator[Piece]:
    """Split a model.

    Args:
        shapes: All parameters.
        config: The Hugging Face config of the language model.
        sizes: The parallel sizes.
    """
    layers = config.get("num_hidden_layers", 1)
    chunk = max(1, math.ceil(layers / (sizes.pipeline * sizes.virtual_pipeline)))
    last = sizes.pipeline - 1
    for name, shape in shapes.items():
        vision, layer = VISION.search(name) is not None, LAYER.search(name)
        number = None if vision or layer is None else int(layer[1])
        expert = ".experts." in name
        size = math.prod(shape) if vision else _size(name, shape, config, sizes, expert=expert)
        if number is not None:
            stage = last if number >= layers else number // chunk % sizes.pipeline
        else:
            stage = 0 if vision or kind_of(name) == "embed_tokens" else last
        yield Piece(name, shape, size, stage, expert, number)
        if kind_of(name) == "embed_tokens" and sizes.pipeline > 1 and not {LM_HEAD, SCORE_HEAD} & shapes.keys():
            yield Piece(name, shape, size, last, expert=False, layer=None)  # tied, and used at both ends


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
