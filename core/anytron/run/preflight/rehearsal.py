"""Try rewards on the run's own data before anything is generated.

For each prompt, the check is that the right answer earns the reward and that wrong answers do not. The right answer is
written in the forms that models use, and each form is scored; the best of them must score more than an empty
response, the word ``None``, the right answer of another prompt, and the prompt itself.

Rewards that are expensive or need a model are not tried: ``judge``, ``reward_model`` and ``environment``. A run makes
this check at its start, in seconds, and reports the findings in one line. The run ends if a reward function fails for
every right answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from typing_extensions import Self

from anytron.base.errors import within
from anytron.run.preflight.trial import Finding, Rehearsal, Trial, no_answer
from anytron.task.data.thoughts import opened
from anytron.task.rewards.pool import RewardPool
from anytron.task.rewards.registered import REWARDS
from anytron.task.rewards.scoring import side_by_side

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
    from pathlib import Path

    from anytron.config.schema import RunConfig
    from anytron.config.scoring import RewardSection
    from anytron.record.tracking.progress import Progress
    from anytron.run.preflight.prepare import PreparedRun, ValidationSet
    from anytron.task.data.prompts import TokenizedPrompt
    from anytron.task.rewards.scoring import RewardWorkers

AT_ONCE = 64
"""Number of prompts whose responses are scored in one call if time is not limited."""
TIMED = 4
"""Number of prompts in one call of a registered reward if time is limited: the clock is checked after each call."""
ROWS, OWN_ROWS = 32, 8
"""Number of prompts on which each registered reward, and each function of the user, is tried when a run starts. All
prompts of a user's function are scored in one call."""
BEGIN_S, GIVE_UP_S = 4.0, 6.0
"""Time limits when a run starts, in seconds since the call of :func:`rehearse`. After the first limit, a reward begins
no call but its first; after the second limit, no answer is awaited. Making a reward takes a part of this time
(``math``: a second or two)."""
NOT_TRIED = frozenset({"judge", "reward_model", "environment"})
"""Rewards that ask a model or an environment."""
TRAINING = "training"


def require_earnable(
    config: RunConfig,
    prepared: PreparedRun,
    examined: Sequence[ValidationSet],
    running: RewardWorkers,
    logs: Path,
    progress: Progress,
) -> None:
    """Try the rewards of training and of validation on some prompts, and report the findings in one line.

    Args:
        config: The run's configuration.
        prepared: The prepared training data of the run.
        examined: The validation sets of the run.
        running: The processes that score training's responses.
        logs: Directory for the output of the user's functions while they are tried.
        progress: Display that prints the line.

    Raises:
        DataError: A function fails for every right answer that was tried, or cannot be called.
    """
    subjects = {TRAINING: prepared, **{one.section.title: one.prepared for one in examined}}
    with TrialProcesses(logs, config.executor.start_timeout_s, running) as processes:
        done = rehearse(subjects, processes, brief=True, has_environment=config.environment is not None)
    for subject, one in done.items():
        for refusal in filter(None, (trial.refusal() for trial in one.trials)):
            if subject == TRAINING:
                raise refusal
            with within(subject):
                raise refusal
    late = [f"{where}: {trial.name} gave no answer in time" for where, trial in _trials(done) if not trial.tried]
    troubles = [
        f"{where}: {found.what.rstrip('.')} ({found.count}, prompt {found.rows[0][0]})"
        for where, one in done.items()
        for found in one.found.findings
    ]
    tried = [f"{where}: {trial.name} ({trial.tried})" for where, trial in _trials(done) if trial.tried]
    if troubles:
        progress.warn(f"rehearsal: {'; '.join([*troubles, *late])}. For details: anytron data check CONFIG")
    elif tried or late:
        good = (
            [f"rewards can be earned, and only by right answers (prompts tried): {', '.join(tried)}"] if tried else []
        )
        progress.note(f"rehearsal: {'; '.join([*good, *late])}")


def rehearse(
    subjects: Mapping[str, PreparedRun],
    processes: TrialProcesses,
    *,
    brief: bool = False,
    has_environment: bool = False,
    tell: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[str, Rehearsed]:
    """Examine prompts, and try rewards on them, different rewards in parallel.

    Args:
        subjects: The run, and the run with the prompts and rewards of each validation set, by name.
        processes: Processes in which rewards are tried; a reward that several subjects share uses the same processes.
        brief: Whether to try only some prompts, for a few seconds; False = all prompts, without a time limit.
        has_environment: Whether the run has an environment. Its responses have turns, which user functions may read.
        tell: Called with the name of a reward, the number of prompts tried so far, and the number of all prompts.

    Returns:
        The results, by the names in ``subjects``.

    Raises:
        DataError: ``right_answer`` of a reward class fails.
    """
    now = monotonic()
    begin_until, until = (now + BEGIN_S, now + GIVE_UP_S) if brief else (math.inf, math.inf)
    done: dict[str, Rehearsed] = {}
    groups: list[tuple[RewardPool, list[Trial]]] = []
    for subject, prepared in subjects.items():
        with within(subject):
            done[subject] = one = Rehearsed(_looked_at(prepared, ROWS if brief else None), [])
            for index, (name, section) in enumerate(prepared.rewards.sections.items()):
                own = section.function not in REWARDS
                rows, at_once = (OWN_ROWS if own else ROWS, OWN_ROWS if own else TIMED) if brief else (None, AT_ONCE)
                prompts, told = Evenly(prepared.sampler.tables, rows), partial(tell, name)
                why = _left_out(section, has_environment=has_environment)
                trial = None if why else Trial(name, section, prompts, prepared, one.found, at_once, begin_until, told)
                if trial is None or not len(trial):
                    one.found.left_out[name] = why or no_answer(section)
                    continue
                one.trials.append(trial)
                pool = processes.pool(subject, f"rewards[{index}]", name, section)
                sharing = next((trials for other, trials in groups if other is pool), None)
                if sharing is None:
                    groups.append((pool, sharing := []))
                sharing.append(trial)
    side_by_side([(pool, _in_turn(trials, pool)) for pool, trials in groups], until)
    for one in done.values():
        for trial in one.trials:
            if not trial.tried and trial.error is None:
                one.found.left_out[trial.name] = f"it gave no answer within {GIVE_UP_S:g} s"
            trial.finish()
    return done


class Evenly(Sequence["TokenizedPrompt"]):
    """Prompts that are taken at equal distances from all tables; each is made when it is accessed.

    Args:
        tables: The prompts.
        count: Approximate number of prompts; None = all.
    """

    def __init__(self, tables: Sequence[Sequence[TokenizedPrompt]], count: int | None) -> None:
        step = 1 if count is None else max(1, -(-sum(map(len, tables)) // count))
        self._places = [(table, range(0, len(table), step)) for table in tables]

    def __len__(self) -> int:
        return sum(len(places) for _, places in self._places)

    def __getitem__(self, index: int) -> TokenizedPrompt:  # type: ignore[override]
        for table, places in self._places:
            if index < len(places):
                return table[places[index]]
            index -= len(places)
        raise IndexError(index)


class TrialProcesses:
    """The processes in which rewards are tried, with a run's limits. A context manager: leaving ends them.

    A user function gets separate processes, so that the rehearsal leaves no state in training's processes.

    Args:
        logs: Directory for the logs of the processes.
        start_timeout_s: Seconds within which a process must find its function.
        running: Processes that the run has started. Processes of registered rewards are reused: they have no state.
            None = no processes are reused.
    """

    def __init__(self, logs: Path, start_timeout_s: float, running: RewardWorkers | None = None) -> None:
        self._logs, self._start_timeout_s, self._leaving = logs, start_timeout_s, ExitStack()
        self._pools = [one for one in (running.pools if running else ()) if one.section.function in REWARDS]

    def pool(self, subject: str, key: str, name: str, section: RewardSection) -> RewardPool:
        """Return the processes of a reward, the same ones for the same configuration; does not wait for them."""
        known = next((pool for pool in self._pools if pool.section == section), None)
        if known is None:
            logs = self._logs / subject.replace(" ", "-")
            logs.mkdir(parents=True, exist_ok=True)
            known = self._leaving.enter_context(RewardPool(name, section, key, logs, self._start_timeout_s))
            self._pools.append(known)
        return known

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._leaving.close()


@dataclass(frozen=True)
class Rehearsed:
    """The result of trying the rewards of training or of one validation set.

    Attributes:
        found: The findings.
        trials: The rewards that were tried.
    """

    found: Rehearsal
    trials: list[Trial]


def _in_turn(trials: Sequence[Trial], pool: RewardPool) -> Generator[None, None, None]:
    for trial in trials:
        yield from trial.run(pool)


def _left_out(section: RewardSection, *, has_environment: bool) -> str:
    """Return why a reward is not tried; empty if it is tried."""
    if section.function in NOT_TRIED:
        return "it asks a model or an environment"
    return "it may need an environment" if has_environment and section.function not in REWARDS else ""


def _looked_at(prepared: PreparedRun, rows: int | None) -> Rehearsal:
    """Find problems of prompts; note a chat template that reads the clock, and opening tags at the end of prompts."""
    prompts, found = Evenly(prepared.sampler.tables, rows), Rehearsal()
    found.findings += examine_prompts(prompts, prepared)
    if prepared.beginning.reads_the_clock:
        found.notes.append(
            "the chat template reads the clock: prompts show when the run began (anytron data show CONFIG)"
        )
    marks = sorted({opened(prompt.text).strip() for prompt in prompts} - {""})
    if marks:
        found.notes.append(
            f"prompts end with {', '.join(marks)}: format, regex and reasoning_gym read it as the start of the response"
        )
    return found


def examine_prompts(prompts: Iterable[TokenizedPrompt], prepared: PreparedRun) -> Iterator[Finding]:
    """Find what is wrong with prompts as the model reads them."""
    tokenizer, ends = prepared.tokenizer, set(prepared.sampling.end_token_ids)
    begin = tokenizer.bos_token_id
    twice = Finding(
        f"A prompt begins with {tokenizer.bos_token} twice.",
        f"remove {tokenizer.bos_token} from the prompts or messages: the chat template or the tokenizer adds it",
    )
    ended = Finding(
        "A prompt ends with an end-of-response token.",
        "remove it from the prompts, or use a chat template with a generation prompt (add_generation_prompt)",
    )
    for prompt in prompts:
        tokens = prompt.tokens
        if begin is not None and tokens[:2] == (begin, begin):
            twice.add(prompt.id, prompt.text[:40])
        last = next((token for token in reversed(tokens[-4:]) if tokenizer.decode([token]).strip()), None)
        if last in ends:
            ended.add(prompt.id, prompt.text[-40:])
    yield from (one for one in (twice, ended) if one.count)


def _trials(done: Mapping[str, Rehearsed]) -> Iterator[tuple[str, Trial]]:
    return ((where, trial) for where, one in done.items() for trial in one.trials)
