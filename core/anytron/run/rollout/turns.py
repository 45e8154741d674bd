"""How a run's responses are made: in one turn, in several turns with an environment, or by agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.run.rollout.agents import Agents
from anytron.run.rollout.conversations import Conversations
from anytron.workers.engines.rollout_engine import PromptInputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anytron.config.schema import RunConfig
    from anytron.run.preflight.prepare import PreparedRun
    from anytron.run.rollout.pool import Generation, RolloutPool
    from anytron.serving.endpoint import Endpoint
    from anytron.task.data.prompts import TokenizedPrompt
    from anytron.task.environments.pool import EnvironmentPool
    from anytron.workers.engines.rollout_engine import Response, SamplingParams
    from anytron.workers.executor.protocol import Host, Pending, Share, WorkerGroup


class SingleTurns:
    """Responses of one turn.

    Args:
        pool: The rollout engines that generate them.
        sampling: Sampling parameters.
    """

    def __init__(self, pool: RolloutPool, sampling: SamplingParams) -> None:
        self._pool, self._sampling = pool, sampling

    def begin(self, prompts: Sequence[TokenizedPrompt], samples_per_prompt: int, seed: int) -> Generation:
        """Ask for responses to each prompt; see :meth:`RolloutPool.begin`."""
        inputs = [PromptInputs(prompt.tokens, prompt.patches) for prompt in prompts]
        return self._pool.begin(inputs, self._sampling, samples_per_prompt, seed)

    def finish(self, begun: Generation, *, more: bool = False) -> list[list[Response]]:
        """Wait for responses; return the responses to each prompt, in order. ``more`` has no effect here."""
        del more
        return self._pool.finish(begun)

    def finish_in_flight(self) -> None:
        """Finish all responses that were begun; see :meth:`RolloutPool.finish_in_flight`."""
        self._pool.finish_in_flight()

    def attend(self, call: Pending) -> None:
        """Continue until a call of the training ranks is over; see :meth:`RolloutPool.attend`."""
        self._pool.attend(call)


Turns = SingleTurns | Conversations | Agents


def turns_of(
    config: RunConfig,
    prepared: PreparedRun,
    pool: RolloutPool,
    environments: EnvironmentPool | None,
    endpoint: Endpoint | None = None,
) -> Turns:
    """Return the maker of a run's responses.

    Args:
        config: The run's configuration.
        prepared: Tokenizer, sampling parameters and limits of the model.
        pool: The rollout engines.
        environments: The processes of environments or agents; None without an environment.
        endpoint: The server by which agents reach the model; None without agents.
    """
    if config.environment is None or environments is None:
        return SingleTurns(pool, prepared.sampling)
    if not config.environment.is_agent:
        return Conversations(pool, prepared, environments, config.environment)
    assert endpoint is not None, "a run with agents has one"
    return Agents(pool, prepared, environments, endpoint, config.environment)


class AttendedGroup:
    """A :class:`~anytron.workers.executor.protocol.WorkerGroup` whose calls keep replicas and environments busy.

    A replica generates while it is polled, and the driver polls it whenever it waits: here, for the training ranks.

    Args:
        group: The training ranks.
        turns: The maker of responses, which goes on while the training ranks work.
    """

    def __init__(self, group: WorkerGroup, turns: Turns) -> None:
        self._group, self._turns = group, turns

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    @property
    def hosts(self) -> Sequence[Host]:
        """The machine of each rank."""
        return self._group.hosts

    @property
    def ended(self) -> bool:
        """Whether the processes have ended."""
        return self._group.ended

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Call a method on all ranks without waiting."""
        return self._group.submit(method, *args, **kwargs)

    def submit_each(self, method: str, shares: Iterable[Share[tuple[Any, ...]]]) -> Pending:
        """Call a method on all ranks with different arguments, without waiting."""
        return self._group.submit_each(method, shares)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks, and go on generating responses until it is done."""
        return self._wait(self.submit(method, *args, **kwargs))

    def scatter(self, method: str, shares: Iterable[Share[tuple[Any, ...]]]) -> list[Any]:
        """Call a method on all ranks with different arguments, and go on generating responses until it is done."""
        return self._wait(self.submit_each(method, shares))

    def rebuild(self, config: RunConfig) -> None:
        """Build engines for another configuration in the same processes."""
        self._group.rebuild(config)

    def end(self) -> None:
        """End the processes without notifying their engines."""
        self._group.end()

    def _wait(self, call: Pending) -> list[Any]:
        self._turns.attend(call)
        return list(call.result())
