"""A mutant: the processor as a platform that is broken in one way, and the rule that must notice."""

from __future__ import annotations

from contextlib import nullcontext

from anytron_cpu import CpuPlatform


class Mutant(CpuPlatform):
    """Breaks nothing by itself.

    A subclass breaks one thing; ``python -m anytron conformance`` finds it if it is offered as an entry point under
    :attr:`name`.

    Attributes:
        rule: Name of the rule that must fail.
        says: What the failure's reason, or its difference, must contain.
        extensions: Plugins that are installed beside it.
    """

    rule = ""
    says = ""
    extensions: dict[str, object] = {}  # noqa: RUF012

    @classmethod
    def breaks(cls, role):
        """Break a process of a role, by a context manager, while an engine of this platform is in use there."""
        return nullcontext()

    def __init_subclass__(cls, **arguments):
        super().__init_subclass__(**arguments)
        cls.name = f"mutant-{cls.__name__.lower()}"


class Unbroken(Mutant):
    """The processor under another name."""


def mutants_of(module):
    """The mutants of a module."""
    found = vars(module).values()
    return [one for one in found if isinstance(one, type) and issubclass(one, Mutant) and one.rule]
