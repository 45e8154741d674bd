"""Replace attributes of modules and classes, and restore each to the same object."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch.jit import _builtins

from anytron.device.patches.rebind import rebind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_INHERITED = object()


@dataclass(frozen=True)
class Substitution:
    """The replacement of the attribute ``owner.name`` by ``new``.

    ``own``: whether ``new`` was made for this substitution only. If so, modules that have imported ``new`` by name get
    the original back at the end.
    """

    owner: Any
    name: str
    new: Any
    own: bool = True


def substitute(substitutions: Iterable[Substitution]) -> Callable[[], None]:
    """Make all substitutions; return the function that undoes them in reverse.

    Undoing deletes attributes that the owner only inherited (``Tensor.to`` is defined in ``TensorBase``). Loaded
    modules that hold an old object by name (``from torch.cuda import _lazy_call``) get the new one, and the old one
    back at the end, so that a module imported in between keeps no new object. torch's own modules outside of
    ``torch.cuda`` stay unchanged, because they implement the originals. ``torch.jit.script`` compiles code with new
    objects as if these were the originals.
    """
    table = list(substitutions)
    originals = [vars(entry.owner).get(entry.name, _INHERITED) for entry in table]
    pairs = [
        (original, entry.new)
        for original, entry in zip(originals, table, strict=True)
        if isinstance(entry.owner, ModuleType) and original is not _INHERITED and entry.own
    ]
    # TorchScript knows its operators by the identity of torch's functions, in a table that torch fills at its first
    # use: filled later, it would hold the new ones and never again the originals.
    operators = _builtins._get_builtin_table()
    scripted = {
        id(entry.new): operators[id(original)]
        for original, entry in zip(originals, table, strict=True)
        if entry.own and id(original) in operators
    }
    for entry in table:
        setattr(entry.owner, entry.name, entry.new)
    rebind(pairs, _may_be_rebound)
    operators.update(scripted)

    def undo() -> None:
        for new in scripted:
            del operators[new]
        for original, entry in zip(reversed(originals), reversed(table), strict=True):
            if original is _INHERITED:
                delattr(entry.owner, entry.name)
            else:
                setattr(entry.owner, entry.name, original)
        rebind([(new, original) for original, new in pairs], _may_be_rebound)

    return undo


def _may_be_rebound(module: str) -> bool:
    return not module.startswith(("torch.", "anytron_megatron.redirect")) or module.startswith("torch.cuda.")
