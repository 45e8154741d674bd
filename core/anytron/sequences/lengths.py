"""Take sequence lengths out of what other libraries hand over, and refuse what is not ragged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence


def checked_lengths(lengths: Sequence[int] | Tensor, context_length: int | None = None) -> Tensor:
    """Hold lengths against the rules: at least one sequence, none empty, none longer than the model can read.

    Args:
        lengths: Real lengths; a sequence of ints or an int tensor ``[B]``. One on a device is copied
            to the host, once: the only synchronisation that a layout costs.
        context_length: The longest sequence that the model reads; None = no limit.

    Returns:
        int64 ``[B]`` on the host.

    Raises:
        DataError: Another shape, no integers, a length below 1 or above ``context_length``.
    """
    real = lengths.cpu() if isinstance(lengths, Tensor) else torch.tensor(lengths)
    if real.ndim != 1 or real.numel() == 0:
        raise DataError("A layout needs at least one sequence.", where="lengths", why=f"shape {tuple(real.shape)}")
    _require_integers(real, "lengths")
    real = real.to(torch.int64)
    shortest, longest = (int(end) for end in real.aminmax())
    if shortest < 1:
        index = int(real.argmin())
        raise DataError("A sequence has no tokens.", where="lengths", why=f"sequence {index} has length {shortest}")
    if context_length is not None and longest > context_length:
        index = int(real.argmax())
        raise DataError(
            "A sequence is longer than the model's context.",
            where="lengths",
            why=f"sequence {index} has length {longest}, the context {context_length}",
            fix="shorten data.max_prompt_tokens or rollout.max_new_tokens",
        )
    return real


def lengths_from_cu_seqlens(cu_seqlens: Tensor) -> Tensor:
    """Turn cumulative lengths into lengths.

    Args:
        cu_seqlens: int32 or int64 ``[B + 1]`` with a leading 0, as flash-attn and Megatron write them
            (``npu_fusion_attention`` writes them without the 0).

    Returns:
        int64 ``[B]`` on the host.

    Raises:
        DataError: Another shape or dtype, no leading 0, or not strictly increasing.
    """
    where = "cu_seqlens"
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        why = f"shape {tuple(cu_seqlens.shape)}, expected (B + 1,) with B at least 1"
        raise DataError("Cumulative lengths have the wrong shape.", where=where, why=why)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        why = f"dtype {cu_seqlens.dtype}, expected torch.int32 or torch.int64"
        raise DataError("Cumulative lengths have the wrong dtype.", where=where, why=why)
    ends = cu_seqlens.cpu().to(torch.int64)
    if int(ends[0]) != 0:
        raise DataError("Cumulative lengths must begin with 0.", where=where, why=f"they begin with {int(ends[0])}")
    lengths = ends.diff()
    if int(lengths.min()) < 1:
        index = int((lengths < 1).to(torch.int8).argmax())
        why = f"sequence {index} goes from {int(ends[index])} to {int(ends[index + 1])}"
        raise DataError("Cumulative lengths must increase strictly.", where=where, why=why)
    return lengths


def lengths_from_keep_mask(keep: Tensor) -> Tensor:
    """Turn the mask of a right-padded batch into lengths; ``tokens[keep]`` are then the flat tokens.

    Args:
        keep: bool ``[B, S]``, True = real token.

    Returns:
        int64 ``[B]`` on the host.

    Raises:
        DataError: Another shape or dtype (a 0/1 mask may have either polarity: say which one by
            ``mask == 1``), a row without tokens, padding on the left or between tokens.
    """
    where = "keep mask"
    if keep.ndim != 2:
        raise DataError("A keep mask is [B, S].", where=where, why=f"shape {tuple(keep.shape)}")
    if keep.dtype is not torch.bool:
        raise DataError(
            "A keep mask is bool, True = real token.", where=where, why=f"dtype {keep.dtype}", fix="pass mask == 1"
        )
    keep = keep.cpu()
    lengths = keep.sum(1)
    misplaced = (keep != (torch.arange(keep.shape[1]) < lengths[:, None])).any(1)
    if bool(misplaced.any()):
        row = int(misplaced.to(torch.int8).argmax())
        side = "on the left" if not bool(keep[row, 0]) else "between tokens"
        raise DataError(
            "Padding must be on the right.",
            where=where,
            why=f"row {row} has padding {side}",
            fix="move it: tokens[keep] and the lengths are all that is needed",
        )
    return checked_lengths(lengths)


def _require_integers(values: Tensor, where: str) -> None:
    if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype is torch.bool:
        raise DataError("Lengths are integers.", where=where, why=f"dtype {values.dtype}")
