"""The processes of one reward function, and the handling of samples for which it fails."""

from __future__ import annotations

from collections import deque
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from typing_extensions import Self

from anytron.base.errors import DataError
from anytron.task.isolation.process import Gone, IsolatedProcess, ProcessSettings
from anytron.task.rewards.answer import Answer, Failure

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from anytron.config.scoring import RewardSection
    from anytron.task.rewards.sample import Sample


HOPELESS = 16
"""If this many samples were tried one by one, and no sample of the step succeeded, the function fails for all."""

Call = tuple[int, ...]
"""Positions of the samples of one call."""

Scored = tuple[list[float | None], "dict[int, Failure]"]
"""A number for each sample, None where the function failed; and the failures, by the sample's position."""


class RewardPool:
    """Scores samples with one function, in separate processes. A context manager: leaving ends them.

    Args:
        name: Name of the reward.
        section: Section of the reward in the configuration.
        key: Configuration key of that section.
        logs: An existing directory; each process writes to ``reward-NAME-N.log``.
        start_timeout_s: Seconds that a process may take to start and find the function.
    """

    def __init__(self, name: str, section: RewardSection, key: str, logs: Path, start_timeout_s: float) -> None:
        self.name = name
        self.section = section
        self._key = key
        self._logs = [logs / f"reward-{name}-{number}.log" for number in range(section.processes)]
        self._start_timeout_s = start_timeout_s
        self._processes: list[RewardProcess] = []
        self._busy: dict[int, Call] = {}
        try:
            for number in range(section.processes):
                self._processes.append(self._started(number))
        except BaseException:
            self.close()
            raise

    @property
    def connections(self) -> list[Connection]:
        """Sockets of the busy processes: when one is readable, :meth:`score` can go on; else at the ``deadline``."""
        return [self._processes[number].connection for number in self._busy]

    @property
    def deadline(self) -> float:
        """Time at which :meth:`score` can go on in any case, on the clock of :func:`time.monotonic`."""
        return min(self._processes[number].deadline for number in self._busy)

    def score(
        self, samples: Sequence[Sample], *, more: bool = False, forgiving: bool = False
    ) -> Generator[None, None, Scored]:
        """Call the function with all samples; if a call fails, call it with single samples, to find the failing ones.

        Args:
            samples: Samples of a step.
            more: Whether the step has further samples, some of which have a score. Then it is not an error if the
                function fails for all of ``samples``.
            forgiving: Whether to return failures instead of raising them, even if ``on_error`` is ``stop``.

        Yields:
            None whenever it has to wait (:attr:`connections`, :attr:`deadline`).

        Returns:
            A score for each sample, None where the function failed, and the failures.

        Raises:
            DataError: The function fails for a sample and ``on_error`` is ``stop``; it fails for all samples of the
                step; or its process cannot start, or cannot read the samples.
        """
        values: list[float | None] = [None] * len(samples)
        failures: dict[int, Failure] = {}
        alone: list[int] = []
        for came in self._answers(samples, shares(samples, self.section.processes)):
            if came is None:
                yield
                continue
            call, answer = came
            if answer.failures and self.section.on_error == "stop" and not forgiving:
                first = answer.failures[0]
                known = first.sample is not None or len(call) == 1
                raise reward_error(self.name, first, samples[call[first.sample or 0]] if known else None)
            self._enter(call, answer, values, failures)
            if not answer.whole and len(call) > 1:
                alone += call
        # The first sample of each prompt, then the second of each: prompts of a kind may be hopeless together.
        place = {index: rank for group in _groups(samples) for rank, index in enumerate(group)}
        alone.sort(key=lambda index: (place[index], index))
        tried = 0
        for came in self._answers(samples, [(index,) for index in alone]):
            if came is None:
                yield
                continue
            self._enter(*came, values, failures)
            tried += 1
            if tried >= HOPELESS and not more and all(value is None for value in values):
                break
        if not more and all(value is None for value in values):
            index = min(failures)
            raise reward_error(self.name, failures[index], samples[index], every=True)
        return values, failures

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @staticmethod
    def _enter(call: Call, answer: Answer, values: list[float | None], failures: dict[int, Failure]) -> None:
        """Enter the answer to one call; if a call of several samples fails as a whole, no sample counts as failed."""
        for index, value in zip(call, answer.values, strict=False):
            values[index] = value
        for failure in answer.failures:
            if answer.whole or len(call) == 1:
                failures[call[failure.sample or 0]] = failure

    def _answers(self, samples: Sequence[Sample], calls: Sequence[Call]) -> Iterator[tuple[Call, Answer] | None]:
        """Make calls, as many at a time as there are processes; yield their answers as they come, None to wait."""
        waiting = deque(calls)
        busy = self._busy
        try:
            while waiting or busy:
                for number in range(len(self._processes)):
                    if waiting and number not in busy:
                        busy[number] = waiting.popleft()
                        self._living(number).give([samples[index] for index in busy[number]])
                yield None
                for number, call in list(busy.items()):
                    answer = self._processes[number].take()
                    if answer is not None:
                        del busy[number]
                        yield call, answer
        finally:
            for number in busy:  # nobody waits for these answers any more
                self._processes[number].end()
            busy.clear()

    def _living(self, number: int) -> RewardProcess:
        if self._processes[number].ended:
            self._processes[number].end()
            self._processes[number] = self._started(number)
        return self._processes[number]

    def _started(self, number: int) -> RewardProcess:
        return RewardProcess(self.name, self.section, self._key, self._logs[number], self._start_timeout_s)


def reward_error(reward: str, failure: Failure, sample: Sample | None, *, every: bool = False) -> DataError:
    """Make the error that ends a run because a reward fails.

    Args:
        reward: Name of the reward.
        failure: The failure.
        sample: The failing sample; None if unknown.
        every: Whether the reward fails for all samples of the step.
    """
    where = f"reward {reward}"
    if sample is not None:
        where += f", prompt {sample.prompt_id}, response {sample.response_text[:80]!r}"
    return DataError(
        failure.what,
        where=f"{where} (for every sample of the step)" if every else where,
        why=failure.why,
        fix=f"{failure.fix}; the step's samples are in samples.jsonl",
    )


def shares(samples: Sequence[Sample], count: int) -> list[Call]:
    """Divide samples into at most ``count`` calls of similar size; samples of one prompt stay together."""
    groups = _groups(samples)
    count = min(count, len(groups))
    if not count:
        return []
    bounds = [len(groups) * part // count for part in range(count + 1)]
    return [tuple(index for group in groups[start:end] for index in group) for start, end in pairwise(bounds)]


def _groups(samples: Sequence[Sample]) -> list[list[int]]:
    """Positions of the samples of each prompt; they stand side by side."""
    return [list(group) for _, group in groupby(range(len(samples)), key=lambda index: samples[index].prompt_id)]


class RewardProcess(IsolatedProcess):
    """Calls a reward function in a separate process.

    One call at a time: :meth:`give`, then :meth:`take` until there is an answer.

    Args:
        name: Name of the reward, for messages.
        section: Section that names the function.
        key: Configuration key of the section.
        log: File to which the output of the process is appended.
        start_timeout_s: Seconds that the process may take to start and find the function.
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
        """Call the function with these samples, as soon as the process has started."""
        self._samples = len(samples)
        self.send([samples], steps=len(samples))

    def take(self) -> Answer | None:
        """Return the answer; None if there is no answer yet.

        If the call took too long, or the process has ended, the answer is a failure with the reason.

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
            fix = "let the reward's code write only to files and sockets that it has opened"
            return Failure("A reward process sent an invalid answer.", gone.why, fix, sample=gone.at)
        return Failure(
            "A reward process died.",
            gone.why,
            f"the kernel usually sends SIGKILL when memory runs out: set {self._key}.memory_gib"
            if gone.killed
            else "run programs in a separate process, so that they cannot end this one",
            sample=gone.at,
        )
