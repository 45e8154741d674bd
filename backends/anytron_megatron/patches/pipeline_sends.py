"""Keep what a pipeline stage sends until it is sent.

An interleaved schedule posts a send and drops the tensor's memory at once
(``deallocate_output_tensor``: ``out.data = torch.empty(1)``). A process group that copies tensors on a
stream of its device has secured the memory by then; one that sends from the tensor's own memory (gloo)
sends whatever is there when the receiver asks for it. An alias holds the memory for as long as the
request holds the alias.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def send_aliases(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_p2p_ops``: what it sends shares memory with what it is given, and is another tensor object."""

    @functools.wraps(original)
    def post(*, tensor_send_prev: Tensor | None, tensor_send_next: Tensor | None, **rest: Any) -> Any:
        return original(
            tensor_send_prev=None if tensor_send_prev is None else tensor_send_prev.detach(),
            tensor_send_next=None if tensor_send_next is None else tensor_send_next.detach(),
            **rest,
        )

    return post
