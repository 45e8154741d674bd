"""The input of a model: one micro-batch, all padding decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from anytron.sequences.layout import SequenceLayout
    from anytron.sequences.scopes import ScopeFactory


@dataclass(frozen=True)
class ModelInputs:
    """One micro-batch as the model will see it on this rank, all padding decided.

    ``preprocess_sequences`` receives it and may return a changed copy (``dataclasses.replace``).

    Attributes:
        layout: The plan that all tensors here followed.
        input_ids: int64 ``[R, C]`` of ``layout.taken`` (whole sequences for models that shard inside);
            padding holds 0.
        position_ids: int64 ``[R, C]`` of ``layout`` (of ``layout.taken`` where the model packs rows itself), or
            ``[3, R, C]`` for a model with mrope: temporal, vertical, horizontal.
        labels: int64 ``[R, C]`` of ``layout``, as the model's output; the next real token, -100
            (``anytron.sequences.layout.IGNORED_LABEL``) elsewhere.
        scope: Makes a context manager that is entered around this micro-batch's forward pass and around
            each recomputation of it; None if no plugin needs one. A plugin adds its own with
            ``scopes.combine(inputs.scope, mine)``.
        extra: Further arguments of the model's forward, by name (images of a VLM, for example).
    """

    layout: SequenceLayout
    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    scope: ScopeFactory | None = None
    extra: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
