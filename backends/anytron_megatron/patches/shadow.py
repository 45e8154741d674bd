"""Replace an attribute of one instance for a while."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_ABSENT = object()


@contextmanager
def shadowed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of the instance inside the block, and restore it afterwards.

    It bypasses ``__setattr__``, because ``torch.nn.Module``'s would register modules and parameters.
    """
    own = vars(owner)
    before = own.get(name, _ABSENT)
    own[name] = value
    try:
        yield
    finally:
        if before is _ABSENT:
            del own[name]
        else:
            own[name] = before
