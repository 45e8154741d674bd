"""The checks of `anytron verify` and of `anytron doctor`, for other trainers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.base.entries import Entry
    from anytron.proof.doctor.subject import Subject
    from anytron.proof.verification.report import CheckResult, Report, Status, Watcher
    from anytron.proof.verification.scores import (
        LENGTHS,
        check_scores,
        random_sequences,
        transformers_logits,
        verify_scores,
    )
else:

    def __getattr__(name: str) -> object:
        from anytron.base.lazy import find

        return find(__name__, name)


__all__ = [
    "LENGTHS",
    "CheckResult",
    "Entry",
    "Report",
    "Status",
    "Subject",
    "Watcher",
    "check_scores",
    "random_sequences",
    "transformers_logits",
    "verify_scores",
]
