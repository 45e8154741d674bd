"""Keep a tensor in memory until a pipeline stage has sent it.

An interleaved schedule starts to send a tensor and frees its memory at once
(``deallocate_output_tensor``: ``out.data = torch.empty(1)``). A process group that copies tensors on a stream of
the device holds the memory by then. One that sends from the tensor's own memory (gloo) sends whatever is there
when the receiver asks for it. An alias of the tensor keeps the memory for as long as the request holds the alias.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def send_aliases(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_p2p_ops``: send other tensor objects that share the memory of those given."""

    @functools.wraps(original)
    def post(*, tensor_send_prev: Tensor | None, tensor_send_next: Tensor | None, **rest: Any) -> Any:
        return original(
            tensor_send_prev=None if tensor_send_prev is None else tensor_send_prev.detach(),
            tensor_send_next=None if tensor_send_next is None else tensor_send_next.detach(),
            **rest,
        )

    return post
