"""How kernels refuse."""

from __future__ import annotations


class ContractError(ValueError):
    """The arguments of an operator are not what its documentation asks for."""


def require(holds: bool, text: str) -> None:
    """Raise a :class:`ContractError` unless ``holds``."""
    if not holds:
        raise ContractError(text)
