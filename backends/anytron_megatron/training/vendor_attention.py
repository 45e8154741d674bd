"""Set the platform's kernel mode in a vendor's attention modules, which otherwise keep their initial mode.

Portable modules do not need this: they get the mode and the mask tensor from the micro-batch's scope.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType

from anytron.base.errors import EngineError
from anytron.sequences.masks import MaskKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from anytron.sequences.masks import AttnMask

MODES = {
    ("thd", MaskKind.NONE): ("padding_causal", "padding"),
    ("bshd", MaskKind.NONE): ("causal", "no_mask"),
    ("bshd", MaskKind.FULL_4D): ("arbitrary",),
}
"""The values of ``attn_mask_type`` that Transformer Engine accepts for a sequence format and a kind of mask."""


def set_mask_type(chunks: Iterable[nn.Module], mask: AttnMask, sequence_format: str) -> None:
    """Set the platform's mask type in the language model's attention layers.

    If ``mask.reader`` is set, the vendor's attention has been patched to read the mask itself
    (:func:`anytron.sequences.masks.current_mask`), and this function does nothing.

    Raises:
        EngineError: The modules do not accept this mode.
    """
    if mask.reader is not None:
        return
    known = MODES.get((sequence_format, mask.kind), ())
    if mask.kernel_mode not in known:
        raise EngineError(
            f"The vendor's attention modules do not accept the mask's kernel_mode '{mask.kernel_mode}'.",
            where=f"build_attn_mask of plugin '{mask.plugin}' (format {sequence_format}, mask kind {mask.kind.value})",
            why=f"they accept these values of Transformer Engine's attn_mask_type here: {', '.join(known) or 'none'}",
            fix="return a mask whose kernel_mode is one of these; or set portable_modules and implement "
            "attention_kernel; or let the vendor's attention read anytron.sequences.masks.current_mask() and set the "
            "mask's reader",
        )
    causal = (AttnMaskType.causal, AttnMaskType.padding_causal)
    for chunk in chunks:
        for layer in chunk.modules():
            # Vision towers attend in both directions, and cross-attention has other keys: theirs stay as they are.
            if isinstance(layer, Attention) and layer.attention_type == "self" and layer.attn_mask_type in causal:
                layer.attn_mask_type = AttnMaskType[mask.kernel_mode]
