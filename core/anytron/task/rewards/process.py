"""One reward process as the driver sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.task.isolation.process import Gone, IsolatedProcess, ProcessSettings
from anytron.task.rewards.answer import Answer, Failure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anytron.config.scoring import RewardSection
    from anytron.task.rewards.sample import Sample


class RewardProcess(IsolatedProcess):
    """Calls a reward function in a process of its own.

    One call at a time: :meth:`give`, then :meth:`take` until there is an answer.

    Args:
        name: The reward's, for people.
        section: What to call.
        key: Where it stands in the configuration.
        log: Takes all that the process writes; appended to.
        start_timeout_s: Seconds until it must have found the function.
    """

    def __init__(self, name: str, section: RewardSection, key: str, log: Path, start_timeout_s: float) -> None:
        self._key = key
        self._samples = 0
        options = section.model_dump(mode="json")["options"]
        settings = ProcessSettings(
            title="A reward process",
            where=f"{key} ({name})",
            worker="anytron.task.rewards.worker",
            start={"function": section.function, "key": key, "options": options},
            timeout_s=section.timeout_s,
            memory_gib=section.memory_gib,
            start_timeout_s=start_timeout_s,
        )
        super().__init__(settings, log)

    def give(self, samples: Sequence[Sample]) -> None:
        """Let the function be called with these samples, as soon as the process is up."""
        self._samples = len(samples)
        self.send([samples], steps=len(samples))

    def take(self) -> Answer | None:
        """Take what has come, or find that the time is over; None if there is no answer yet.

        An answer that cannot come any more is one, with its reason; the process has ended then.

        Raises:
            DataError: The process could not start, or cannot read the samples.
        """
        message = self.receive()
        if message is None:
            return None
        if isinstance(message, Gone):
            return Answer.failed(self._failure(message))
        try:
            found = Answer.from_json(message, self._samples)
        except ValueError as error:
            return Answer.failed(self._failure(self.reject(f"an invalid answer: {error}")))
        if any(failure.ends for failure in found.failures):
            self.end()
        return found

    def _failure(self, gone: Gone) -> Failure:
        if gone.late:
            return Failure(
                "A reward function took too long.",
                f"more than {self.settings.timeout_s:g} s for a sample; {gone.why}",
                f"if it is only slow, raise {self._key}.timeout_s",
                sample=gone.at,
            )
        if gone.nonsense:
            fix = "do not write into the channel that Anytron opens in this process"
            return Failure("A reward process sent an invalid answer.", gone.why, fix, sample=gone.at)
        return Failure(
            "A reward process died.",
            gone.why,
            "the kernel usually sends SIGKILL when memory runs out: set rewards[].memory_gib"
            if gone.killed
            else "run programs in a separate process, so that they cannot end this one",
            sample=gone.at,
        )
