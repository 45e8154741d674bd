"""Public names for programs with their own trainer: the checks of `anytron verify` and of `anytron doctor`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.base.results import Result, Status
    from anytron.proof.checks import Report, Watcher
    from anytron.proof.doctor.subject import Subject
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
    "Report",
    "Result",
    "Status",
    "Subject",
    "Watcher",
    "check_scores",
    "random_sequences",
    "transformers_logits",
    "verify_scores",
]
