"""What follows from a micro-batch's cumulative lengths: made for its first layer, found again by the others."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import Tensor

    from anytron.kernels.contract import AttentionCall

Made = TypeVar("Made")


class MicroBatchCache(Generic[Made]):
    """One thing per micro-batch, keyed by the identity of its cumulative lengths; it dies with them."""

    def __init__(self) -> None:
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __len__(self) -> int:
        return len(self._made)

    def find(self, call: AttentionCall, facts: Hashable, make: Callable[[], Made]) -> Made:
        """What was made for this micro-batch, or make it.

        Args:
            call: Its four cumulative lengths are the key, and their versions, so that a change in place is noticed.
            facts: What else decides; the last thing made is kept.
            make: Makes it.
        """
        key = call.cu_seqlens_q
        assert key is not None, "thd needs cu_seqlens_q"
        others = (call.cu_seqlens_kv, call.cu_seqlens_q_padded, call.cu_seqlens_kv_padded)
        facts = (facts, *(_version(tensor) for tensor in (key, *others)))
        if key in self._made:
            known_facts, references, made = self._made[key]
            same = all(_is(reference, tensor) for reference, tensor in zip(references, others, strict=True))
            if same and known_facts == facts:
                return made  # type: ignore[no-any-return]
        made = make()
        self._made[key] = (facts, [None if tensor is None else weakref.ref(tensor) for tensor in others], made)
        return made


def _version(tensor: Tensor | None) -> int:
    # Tensors made in inference mode keep no version; nothing changes them in place outside of it either.
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _is(reference: weakref.ref[Any] | None, tensor: Tensor | None) -> bool:
    return tensor is None if reference is None else reference() is tensor
