"""Responses of one turn, or of several turns with observations of an environment between them.

A turn is an ordinary request to the rollout engines. Its prompt is the whole conversation so far, token by
token::

    prompt -> turn -> observation -> turn -> observation -> turn        conversation: one sample
              [own]   [not trained]  [own]   [not trained]  [own]       response mask

While some conversations wait for their environment, the engines work on others; and while the driver waits for training
ranks, :class:`AttendedGroup` keeps both at work.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from anytron.base.errors import DataError
from anytron.run.rollout.conversation import Conversation, observation_tokens
from anytron.run.rollout.pool import response_seed
from anytron.task.data.decoding import decode_responses
from anytron.task.isolation.failure import Failure
from anytron.workers.engines.rollout_engine import PromptInputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anytron.config.generation import EnvironmentSection
    from anytron.config.schema import RunConfig
    from anytron.run.preflight.prepare import PreparedRun
    from anytron.run.rollout.pool import Generation, RolloutPool
    from anytron.task.data.prompts import TokenizedPrompt
    from anytron.task.environments import Observation
    from anytron.task.environments.pool import EnvironmentPool
    from anytron.workers.engines.rollout_engine import Response, SamplingParams
    from anytron.workers.executor.protocol import Host, Pending, Share, WorkerGroup

POLL_S = 1.0
"""Seconds to wait if only the engines, or only the environments, are at work."""
GLANCE_S = 0.01
"""Seconds to wait for environments before looking at the engines again, while both are at work."""
GATHER_S = 0.1
"""Seconds that a turn may wait to be requested together with later turns: engines are faster with many at a time."""
HOPELESS = 16
"""The run ends if this many conversations have failed before any environment answered: its code is at fault."""


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


class Conversations:
    """Responses of several turns.

    Args:
        pool: The rollout engines that generate the turns.
        prepared: Tokenizer, sampling parameters and limits of the model.
        environments: The environments that answer the turns.
        section: Section ``environment``, which limits conversations.
    """

    def __init__(
        self, pool: RolloutPool, prepared: PreparedRun, environments: EnvironmentPool, section: EnvironmentSection
    ) -> None:
        self._pool, self._prepared, self._environments, self._section = pool, prepared, environments, section
        self._tokenizer: Any = prepared.tokenizer
        self._begun: dict[int, Conversation] = {}  # by the numbers of their environments
        self._speaking: dict[int, Conversation] = {}  # by the numbers of their requests
        self._ready: list[Conversation] = []  # for the model to speak
        self._ready_since = 0.0
        self._answered = False
        self._failure: Exception | None = None

    def begin(self, prompts: Sequence[TokenizedPrompt], samples_per_prompt: int, seed: int) -> list[list[Conversation]]:
        """Begin the conversations about each prompt: environments are set up, and first turns requested."""
        asked = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
        turns = self._section.max_turns
        conversations = [Conversation(prompt, response_seed(seed, place), turns) for place, prompt in enumerate(asked)]
        for conversation in conversations:
            conversation.number = self._environments.begin(conversation.task)
            self._begun[conversation.number] = conversation
        self._ask(conversations)
        starts = range(0, len(conversations), samples_per_prompt)
        return [conversations[start : start + samples_per_prompt] for start in starts]

    def finish(self, begun: Sequence[Sequence[Conversation]], *, more: bool = False) -> list[list[Response]]:
        """Wait until conversations are over; return the responses to each prompt, in order.

        Args:
            begun: The conversations that :meth:`begin` returned.
            more: Whether the step has further conversations, some of which did not fail; if so, all of these may fail.

        Raises:
            DataError: The environment fails for every response, or for all of the first ones.
        """
        conversations = [conversation for group in begun for conversation in group]
        while self._under_way(conversations):
            self._go_on()
        for conversation in conversations:
            del self._begun[conversation.number]
        if not more:
            _check_hope([one for one in conversations if one.failure is not None], len(conversations))
        return [[conversation.response() for conversation in group] for group in begun]

    def finish_in_flight(self) -> None:
        """Finish all conversations that were begun, as long as a replica has weights."""
        while self._pool.has_weights and self._under_way(self._begun.values()):
            self._go_on()

    def attend(self, call: Pending) -> None:
        """Continue conversations until a call of the training ranks is over.

        An error of the conversations meanwhile is raised by the next :meth:`finish` or :meth:`finish_in_flight`.
        """
        try:
            while not call.done:
                self._go_on(call)
        except Exception as failure:  # noqa: BLE001 - the training ranks are not left in the middle of their call
            self._failure = failure

    def _under_way(self, conversations: Iterable[Conversation]) -> bool:
        """Whether any conversation has a turn in generation or an environment, or :meth:`attend` has kept an error."""
        return self._failure is not None or any(
            one.speaking or self._environments.knows(one.number) for one in conversations
        )

    def _go_on(self, *others: Pending) -> None:
        """Wait for a turn, an environment's answer or a call in ``others``; request what follows from it."""
        if self._failure is not None:
            raise self._failure
        if self._ready and (not self._environments.busy or monotonic() - self._ready_since > GATHER_S):
            self._ask([one for one in self._ready if not one.over])
            self._ready = []
        if self._speaking or others:
            self._listen(0.0 if self._environments.busy else POLL_S, *others)
        alone = not (self._speaking or self._ready or others)
        for number, answer in self._environments.poll(POLL_S if alone else GLANCE_S):
            self._take(self._begun[number], answer)

    def _ask(self, conversations: Sequence[Conversation]) -> None:
        """Ask for the model's next turns."""
        questions = [one.question(self._prepared.sampling, self._room(one)) for one in conversations]
        for number, conversation in zip(self._pool.ask(questions), conversations, strict=True):
            conversation.speaking = True
            self._speaking[number] = conversation

    def _listen(self, seconds: float, *others: Pending) -> None:
        """Take the turns that are done, and give them to their environments."""
        for number, response in self._pool.poll(seconds, *others):
            conversation = self._speaking.pop(number)
            turn = conversation.add_turn(response, self._decoded(response))
            if not conversation.over:  # its environment may have failed in the meantime
                self._environments.step(conversation.number, turn)

    def _take(self, conversation: Conversation, answer: Observation | Failure) -> None:
        """Process an observation, or a failure, of an environment."""
        if isinstance(answer, Failure):
            conversation.end(finished=False, failure=answer)
            if not self._answered:
                _check_hope([one for one in self._begun.values() if one.failure is not None], HOPELESS)
            return
        self._answered = True
        self._answer(conversation, answer)
        if not conversation.over:
            self._ready_since = self._ready_since if self._ready else monotonic()
            self._ready.append(conversation)

    def _decoded(self, response: Response) -> str:
        return decode_responses(self._tokenizer, [response.tokens])[0]

    def _answer(self, conversation: Conversation, observation: Observation) -> None:
        """Append an observation; end the conversation if the environment is done, or no turn or no room is left."""
        conversation.count(observation)
        if observation.done or len(conversation.turns) == conversation.max_turns:
            self._end(conversation, finished=observation.done)
            return
        last = conversation.tokens[-1] if conversation.tokens else None
        known = self._tokenizer, self._prepared.vocab_size, self._prepared.chat_template_kwargs
        tokens = observation_tokens(observation, last, *known)
        if isinstance(tokens, Failure):
            self._end(conversation, finished=False, failure=tokens)
            return
        room = self._room(conversation)
        if len(tokens) > self._section.max_observation_tokens or (room is not None and len(tokens) >= room):
            self._end(conversation, finished=False)
            return
        conversation.add_observation(tokens)

    def _end(self, conversation: Conversation, *, finished: bool, failure: Failure | None = None) -> None:
        conversation.end(finished=finished, failure=failure)
        self._environments.end(conversation.number)

    def _room(self, conversation: Conversation) -> int | None:
        """Tokens that the model's context has left; None = any number."""
        limit = self._prepared.context_length
        return None if limit is None else limit - len(conversation.prompt.tokens) - len(conversation.tokens)


def turns_of(
    config: RunConfig, prepared: PreparedRun, pool: RolloutPool, environments: EnvironmentPool | None
) -> SingleTurns | Conversations:
    """Return the maker of a run's responses: of several turns with an environment, otherwise of one turn."""
    if config.environment is None or environments is None:
        return SingleTurns(pool, prepared.sampling)
    return Conversations(pool, prepared, environments, config.environment)


class AttendedGroup:
    """A :class:`~anytron.workers.executor.protocol.WorkerGroup` whose calls keep replicas and environments busy.

    A replica generates while it is polled, and the driver polls it whenever it waits: here, for the training ranks.

    Args:
        group: The training ranks.
        turns: The maker of responses, which goes on while the training ranks work.
    """

    def __init__(self, group: WorkerGroup, turns: SingleTurns | Conversations) -> None:
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


def _check_hope(failed: Sequence[Conversation], limit: int) -> None:
    """Raise an error, which ends the run, if at least ``limit`` conversations have failed."""
    if len(failed) < limit:
        return
    failure = failed[0].failure
    assert failure is not None, "these have failed"
    raise DataError(
        failure.what,
        where=f"environment, prompt {failed[0].prompt.id} (for every sample so far)",
        why=failure.why,
        fix=failure.fix,
    )
