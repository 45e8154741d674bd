"""Rotary position embeddings (``apply_rope_fusion``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.errors import EngineError
from anytron.kernels.contract import KernelName
from anytron_megatron.portable_te.binding import kernels
from anytron_megatron.portable_te.pytorch.attention.context_parallel import zigzag_positions
from anytron_megatron.portable_te.refusals import refuse_settings

if TYPE_CHECKING:
    from torch import Tensor


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotate queries or keys by their positions.

    ``t`` is ``[S, B, H, D]`` (sbhd), ``[B, S, H, D]`` (bshd) or ``[T, H, D]`` (thd). ``freqs``, ``[S, 1, 1, R]``, has
    the angles of each position. In thd, positions count from the start of each sequence, and ``cu_seqlens``, int32
    ``[B + 1]``, has the offsets of the sequences over all context-parallel ranks. With ``interleaved``, the two numbers
    of a rotated pair are neighbours; otherwise one is in the first half and the other in the second half. ``fused`` has
    no effect: the platform's kernel is always used.

    Raises:
        EngineError: ``start_positions`` is given, or ``tensor_format`` is unknown.
    """
    del fused
    refuse_settings("apply_rotary_pos_emb", {"start_positions": start_positions})
    rotate = kernels().shared(KernelName.ROPE, t.dtype)
    if tensor_format == "thd":
        assert cu_seqlens is not None, "thd needs cu_seqlens"
        angles = freqs[zigzag_positions(cu_seqlens, cp_size, cp_rank), 0]
    elif tensor_format == "sbhd":
        angles = freqs[: t.shape[0]]
    elif tensor_format == "bshd":
        angles = freqs[: t.shape[1]].transpose(0, 1)
    else:
        raise EngineError(
            f"Unknown tensor_format {tensor_format!r}.",
            where="transformer_engine.pytorch.attention.rope.apply_rotary_pos_emb",
            fix="use thd, sbhd or bshd",
        )
    rotated: Tensor = rotate(t, angles, interleaved)
    return rotated
