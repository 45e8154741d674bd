"""Check that this teacher can score what this policy writes. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.config.diagnostics import Diagnostic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron_megatron.checks.subject import Subject


def teacher_diagnostics(teacher: Subject, policy: Subject) -> Iterator[Diagnostic]:
    """Check a teacher against the policy; checks of any model are elsewhere, that of tokenizers is the driver's."""
    if policy.config.get("vision_config") or teacher.config.get("vision_config"):
        message = "no test distils from or into a vision-language model"
        yield Diagnostic("error", teacher.key, message, "leave teacher out, or train a language model")
    known, needed = teacher.text.get("vocab_size"), policy.text.get("vocab_size")
    if known and needed and known < needed:
        yield Diagnostic(
            "error",
            teacher.key,
            (
                f"the teacher knows {known} tokens, and the policy {needed}: it could write tokens that have no "
                "probability there"
            ),
            "give a teacher whose vocab_size is at least the policy's",
        )
