"""The kernel modes that every kernel must know: those of Transformer Engine's ``attn_mask_type``.

The neutral default answers them, and layers that are not the language model's self-attention are called with
them. In contrast to Transformer Engine's, causality is always aligned to the last query and the last key.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from anytron.base.errors import HookContractError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.kernels.contract import AttentionCall

PACKED: Mapping[str, bool] = MappingProxyType({"padding": False, "padding_causal": True})
"""Modes of thd, and whether they are causal. Padding is known by ``cu_seqlens``."""
PADDED: Mapping[str, bool] = MappingProxyType({"no_mask": False, "causal": True, **PACKED, "arbitrary": False})
"""Modes of bshd, and whether they are causal by themselves."""
WITH_TENSOR = frozenset({"padding", "padding_causal", "arbitrary"})
"""Modes of bshd whose mask has a tensor; the others have none."""


def is_causal(call: AttentionCall, kernel: str) -> bool:
    """Read a neutral mode: whether a query sees no later key. Everything else that is hidden, the tensor hides.

    Args:
        call: What the kernel is called with.
        kernel: Its name, for the message.

    Raises:
        HookContractError: The mode is not a neutral one, or its tensor is missing or superfluous.
    """
    known = PACKED if call.format == "thd" else PADDED
    causal = known.get(call.mode)
    if causal is None:
        raise HookContractError(
            f"The {kernel} does not know the kernel mode '{call.mode}'.",
            where=f"attention in {call.format}",
            why=f"{_source(call)}; this kernel reads {', '.join(sorted(known))}",
            fix="let that plugin also return an attention_kernel that reads this mode, or let it return one of the "
            "modes above",
        )
    expected = call.format == "bshd" and call.mode in WITH_TENSOR
    if expected != (call.mask is not None):
        raise HookContractError(
            f"The kernel mode '{call.mode}' does not match its mask.",
            where=f"{kernel}, attention in {call.format}",
            why=f"{_source(call)}, and this mode "
            + ("needs a mask tensor, but there is no tensor" if expected else "takes no mask tensor, but there is one"),
            fix="let build_attn_mask return a mode that matches its tensor",
        )
    return causal


def _source(call: AttentionCall) -> str:
    return f"plugin '{call.mode_from}' answered it to build_attn_mask" if call.mode_from else "the caller gave it"
