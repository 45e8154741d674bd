"""Say which kinds of mask can reach the attention of mcore-bridge's models. Imports no Megatron."""

from __future__ import annotations

from anytron.sequences.masks import MaskKind


def accepted_masks(sequence_format: str, *, context_parallel: int, vision: bool, portable: bool) -> frozenset[MaskKind]:
    """Name the kinds, as ``build_attn_mask`` is told them (``MaskRequest.accepted``).

    Packed sequences end where ``cu_seqlens`` says, and context parallelism has no layer with all keys: both
    go without a tensor. Otherwise a full mask is possible. Portable attention modules find it in the
    micro-batch's scope, whatever the model's forward passes on. A vendor's modules get it through the forward
    (``mcore_bridge/model/gpt_model.py``), which vision-language models do not support (verl #5904).

    Args:
        sequence_format: ``thd`` or ``bshd``.
        context_parallel: Ranks that share each sequence.
        vision: The model takes images.
        portable: The modules are portable, not a vendor's.
    """
    if sequence_format == "thd" or context_parallel > 1 or (vision and not portable):
        return frozenset({MaskKind.NONE})
    return frozenset({MaskKind.NONE, MaskKind.FULL_4D})
