"""Try one reward on prompts, and judge its scores."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from anytron.base.errors import DataError
from anytron.run.preflight.forms import (
    COPIED,
    OTHER,
    reference_answers,
    reference_key,
    right_forms,
    samples_of,
    wrong_forms,
)
from anytron.task.rewards.registered import REWARDS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from anytron.config.scoring import RewardSection
    from anytron.run.preflight.prepare import PreparedRun
    from anytron.task.data.prompts import TokenizedPrompt
    from anytron.task.rewards.answer import Failure
    from anytron.task.rewards.pool import RewardPool

SHOWN = 3
"""Largest number of prompts that a finding names."""
OTHERS = 9
"""A different right answer is looked for in the next ``OTHERS - 1`` prompts."""
SURE = frozenset({"exact_match", "contains", "math"})
"""Rewards that accept each valid right answer in at least one of the tried forms."""
CHANCE = 0.25
"""Largest share of prompts at which a text of :func:`_chance` may earn the reward without becoming a finding."""


@dataclass
class Finding:
    """One kind of problem.

    Attributes:
        what: Description of the problem, for the user.
        fix: How to fix the problem.
        certain: Whether the problem is certain to occur in the run, because it occurred for every prompt.
        count: Number of prompts with the problem.
        rows: Examples: the id of a prompt, and what was observed for it.
    """

    what: str
    fix: str
    certain: bool = False
    count: int = 0
    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, row: str, seen: str) -> None:
        """Count a prompt that has the problem; keep the first ones as examples."""
        self.count += 1
        if len(self.rows) < SHOWN:
            self.rows.append((row, seen))


@dataclass
class FormScore:
    """The scores of responses of one form.

    Attributes:
        right: Whether the responses contain the right answer.
        written: The first response.
        first: Score of the first response; None if the reward failed for it.
        mean: Mean score of the responses that have a score; None if the reward failed for all.
        count: Number of responses that have a score.
    """

    right: bool
    written: str
    first: float | None
    mean: float | None = None
    count: int = 0

    def add(self, score: float | None) -> None:
        """Add the score of a response to the mean and the count; None (the reward failed) changes neither."""
        if score is not None:
            self.count += 1
            self.mean = score if self.mean is None else self.mean + (score - self.mean) / self.count


@dataclass
class Rehearsal:
    """The result of trying rewards on prompts: their scores, and the problems that were found.

    Attributes:
        tried: By reward: number of prompts that it was tried on.
        left_out: By reward: why it was not tried.
        findings: The problems.
        notes: Facts worth knowing that are not problems.
        scores: By reward, then by form of response (``bare``, ``boxed``): the scores of the responses of this form.
        example: By reward: the prompt whose responses are in ``scores``.
    """

    tried: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    scores: dict[str, dict[str, FormScore]] = field(default_factory=dict)
    example: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the rehearsal as JSON values."""
        return asdict(self)


class Trial:
    """One reward, tried on prompts.

    Args:
        name: Name of the reward.
        section: Configuration section of the reward.
        prompts: All prompts; prompts without a right answer are skipped.
        prepared: The run's prompts, rewards and sampling parameters.
        found: The rehearsal to which findings are added.
        at_once: Number of prompts whose responses are scored in one call.
        until: Begin no further call after this time, on the clock of :func:`time.monotonic`.
        tell: Called with the number of prompts tried so far, and the number of all prompts.

    Attributes:
        name, section, found: The arguments.
        failure: First failure of the function at a prompt where it failed for every form of the right answer; None
            without one.
        error: Why the function cannot be called at all; None if it can.
    """

    def __init__(
        self,
        name: str,
        section: RewardSection,
        prompts: Sequence[TokenizedPrompt],
        prepared: PreparedRun,
        found: Rehearsal,
        at_once: int,
        until: float,
        tell: Callable[[int, int], None],
    ) -> None:
        self.name, self.section, self.found = name, section, found
        self.failure: Failure | None = None
        self.error: DataError | None = None
        self._prompts, self._prepared, self._at_once, self._until, self._tell = prompts, prepared, at_once, until, tell
        self._answer = reference_answers(section)
        self._places = array("q", (place for place, one in enumerate(prompts) if self._answer(one) is not None))
        self._never, self._free, self._lucky, self._failed, self._stops, self._long = _kinds(name, section, prepared)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def tried(self) -> int:
        """Number of prompts that the reward has been tried on."""
        return self.found.tried.get(self.name, 0)

    def run(self, pool: RewardPool) -> Generator[None, None, None]:
        """Try the reward; yields whenever its processes have to be waited for."""
        for start in range(0, len(self._places), self._at_once):
            if start and monotonic() > self._until:
                return
            tries = [self._texts(place) for place in range(start, min(start + self._at_once, len(self._places)))]
            written = [
                (prompt, text) for prompt, _, right, wrong in tries for text in (*right.values(), *wrong.values())
            ]
            try:
                samples = samples_of(written, self._prepared)
                values, failures = yield from pool.score(samples, more=True, forgiving=True)
            except DataError as error:
                self.error = error
                self._failed.add(tries[0][0].id, f"{error.what.rstrip('.')}; {error.why}"[:200])
                return
            done = 0
            for prompt, answer, right, wrong in tries:
                count = len(right) + len(wrong)
                why = {place - done: one for place, one in failures.items() if done <= place < done + count}
                self._enter(prompt, answer, right, wrong, values[done : done + count], why)
                done += count
            self._tell(self.tried, len(self._places))

    def finish(self) -> None:
        """Add the findings to the rehearsal, when all prompts have been tried."""
        if self._lucky.count > CHANCE * self.tried:
            self.found.findings.append(self._lucky)
        # All that were chosen: whether time was short decides nothing.
        self._failed.certain = self.error is not None or self._failed.count == len(self._places)
        kinds = self._never, self._free, self._failed, self._stops, self._long
        self.found.findings += [one for one in kinds if one.count]

    def refusal(self) -> DataError | None:
        """Return the error that is certain to occur in the run; None if there is none."""
        if self.error is not None:
            return self.error
        if not self._failed.certain or self.failure is None:
            return None
        where = f"reward {self.name}, prompt {self._failed.rows[0][0]}"
        others = f" (the same for all {self._failed.count} prompts that were tried)" if self._failed.count > 1 else ""
        return DataError(self._failed.what, where=where + others, why=self.failure.why, fix=self._failed.fix)

    def _texts(self, place: int) -> tuple[TokenizedPrompt, str, dict[str, str], dict[str, str]]:
        """Write the responses to one prompt."""
        prompt = self._prompts[self._places[place]]
        answer = self._right(place)
        others = (self._right((place + ahead) % len(self._places)) for ahead in range(1, OTHERS))
        other = next((one for one in others if one != answer), None)
        return (
            prompt,
            answer,
            right_forms(self.section, answer, prompt),
            wrong_forms(self.section, other, prompt),
        )

    def _right(self, place: int) -> str:
        answer = self._answer(self._prompts[self._places[place]])
        assert answer is not None, "only prompts with an answer have a place"
        return answer

    def _enter(
        self,
        prompt: TokenizedPrompt,
        answer: str,
        right: Mapping[str, str],
        wrong: Mapping[str, str],
        values: Sequence[float | None],
        failures: Mapping[int, Failure],
    ) -> None:
        """Judge the scores of one prompt's responses."""
        self.found.tried[self.name] = self.tried + 1
        self.found.example.setdefault(self.name, prompt.id)
        forms = self.found.scores.setdefault(self.name, {})
        scores = dict(zip([*right, *wrong], values, strict=True))
        for form, text in {**right, **wrong}.items():
            forms.setdefault(form, FormScore(form in right, text, scores[form])).add(scores[form])
        if all(scores[form] is None for form in right):
            self.failure = self.failure or failures[0]
            # Of registered rewards, none fails for a right answer that it can read.
            kind = self._never if self.section.function in REWARDS else self._failed
            kind.add(prompt.id, f"{said(failures[0])} (the right answer is {answer[:40]!r})")
        else:
            self._judge(prompt, answer, scores, right)
        if self.section.on_error == "stop" and any(scores[form] is None for form in wrong):
            form = next(form for form in wrong if scores[form] is None)
            self._stops.add(prompt.id, f"for {form}: {said(failures[list(scores).index(form)])}")
        if self.section.function in SURE and (shortest := _length(answer, self._prepared)) is not None:
            self._long.add(prompt.id, f"{answer[:40]!r} has {shortest} tokens")

    def _judge(
        self, prompt: TokenizedPrompt, answer: str, scores: Mapping[str, float | None], right: Mapping[str, str]
    ) -> None:
        known = {form: score for form, score in scores.items() if score is not None}
        best = max(score for form, score in known.items() if form in right)
        if best == min(known.values()) and best <= 0.0:
            self._never.add(prompt.id, f"the right answer {answer[:60]!r} scores {best:g} in every form")
            return
        form = next((form for form, score in known.items() if form not in right and score >= best), None)
        if form is not None:
            kind = self._lucky if form in _chance(self.section) else self._free
            kind.add(prompt.id, f"{form} scores {known[form]:g}, the right answer {answer[:60]!r} {best:g}")


def no_answer(section: RewardSection) -> str:
    """Return why a reward is tried on no prompt."""
    own = "" if section.function in REWARDS else ", and the reward's right_answer(data), if defined, returned None"
    return f"prompts have no entry {reference_key(section)!r}{own}"


def _chance(section: RewardSection) -> tuple[str, ...]:
    """Return the names of the wrong texts that may be right by chance."""
    if section.function not in REWARDS:
        return COPIED
    return (OTHER,) if section.function == "math" else ()


def _kinds(name: str, section: RewardSection, prepared: PreparedRun) -> tuple[Finding, ...]:
    form = "" if section.function in SURE else ", or ask for a form in the prompt that the reward reads"
    own = section.function not in REWARDS
    free = "use a reward that reads the answer alone (math, exact_match, regex), or a stricter pattern"
    return (
        Finding(f"The reward {name} cannot be earned.", f"correct the answer or the option 'key'{form}"),
        Finding(f"The reward {name} is earned without the right answer.", free),
        Finding(f"The reward {name} is earned without the right answer.", free),
        Finding(
            f"The reward {name} fails for right answers.",
            "correct the function; return 0 for a response that it cannot read"
            if own
            else "solve the problem that the example names: the process of the reward cannot be called",
        ),
        Finding(
            f"The reward {name} fails for a wrong answer, and a failure ends the run.",
            "return 0 for a response that the function cannot read, or set on_error of this reward to drop",
        ),
        Finding(
            f"The right answer is longer than rollout.max_new_tokens, for {name}.",
            f"raise rollout.max_new_tokens, now {prepared.sampling.max_new_tokens}",
        ),
    )


def said(failure: Failure) -> str:
    """Describe in one line why a reward fails, without its traceback."""
    return f"{failure.what} {next(iter(failure.why.strip().splitlines()), '')}"


def _length(answer: str, prepared: PreparedRun) -> int | None:
    """Count the tokens of an answer that is longer than ``max_new_tokens``; None for any shorter answer."""
    room = prepared.sampling.max_new_tokens
    if len(answer.encode()) <= room:  # a token has at least one byte
        return None
    length = len(prepared.tokenizer(answer, add_special_tokens=False)["input_ids"])
    return length if length > room else None
