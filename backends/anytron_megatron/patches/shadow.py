"""Let an instance's attribute be another for a while."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_ABSENT = object()


@contextmanager
def shadowed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an instance an attribute of its own; afterwards the instance holds what it held.

    It goes past ``__setattr__``: ``torch.nn.Module``'s would register what it is given.
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
