"""MindSpeed's global sequence lengths and positions, set for one micro-batch.

Two modules have a global of the same name; both are set and restored, also when a recomputation runs
inside another micro-batch.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from anytron.sequences import SequenceLayout
    from anytron.sequences.scopes import ScopeFactory

GLOBALS = (
    ("mindspeed.utils", "_ACTUAL_SEQ_LEN"),
    ("mindspeed.core.context_parallel.get_batch_utils", "_ACTUAL_SEQ_LEN"),
    ("mindspeed.utils", "_POSITION_IDS"),
)
"""Module and name of MindSpeed core_r0.16.0."""


def sequence_scope(layout: SequenceLayout) -> ScopeFactory:
    """Make scopes within which MindSpeed knows the sequences of a finished layout.

    Lengths are int32 ``[B]``, cumulative, padded, without a leading 0 (the contract of ``npu_fusion_attention`` in
    layout TND); positions int64 ``[T, 1]`` (thd) or ``[S, B]`` (bshd), from 0 in each sequence. Both are of all
    context-parallel shards: MindSpeed takes its own part (``rotary_pos_embedding.py``, ``rotary_forward``).
    """
    ends = layout.cu_seqlens_padded[1:].clone()
    if layout.format == "thd":
        starts = torch.repeat_interleave(layout.cu_seqlens_padded[:-1], layout.cu_seqlens_padded.diff())
        positions = (torch.arange(starts.numel(), device=starts.device) - starts)[:, None]
    else:
        positions = torch.arange(layout.max_seqlen, device=ends.device)[:, None].expand(-1, layout.num_sequences)

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        before = _set((ends, ends, positions))
        try:
            yield
        finally:
            _set(before)

    return scope


def _set(values: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Set the globals; return what they held."""
    from importlib import import_module

    before = []
    for (module, name), value in zip(GLOBALS, values, strict=True):
        holder = import_module(module)
        before.append(getattr(holder, name))
        setattr(holder, name, value)
    return tuple(before)
