"""Responses of several turns, with observations of an environment between them.

A turn is an ordinary request to the rollout engines. Its prompt is the whole conversation so far, token by
token::

    prompt -> turn -> observation -> turn -> observation -> turn        conversation: one sample
              [own]   [not trained]  [own]   [not trained]  [own]       response mask

While some conversations wait for their environment, the engines work on others; and while the driver waits for training
ranks, :class:`anytron.run.rollout.turns.AttendedGroup` keeps both at work.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from anytron.base.seeds import response_seed
from anytron.run.rollout.conversation import HOPELESS, Conversation, check_hope, observation_tokens
from anytron.task.data.decoding import decode_responses
from anytron.task.environments import AgentResult
from anytron.task.isolation.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anytron.config.generation import EnvironmentSection
    from anytron.run.preflight.prepare import PreparedRun
    from anytron.run.rollout.pool import RolloutPool
    from anytron.task.data.prompts import TokenizedPrompt
    from anytron.task.environments import Observation
    from anytron.task.environments.pool import EnvironmentPool
    from anytron.workers.engines.rollout_engine import Response
    from anytron.workers.executor.protocol import Pending

POLL_S = 1.0
"""Seconds to wait if only the engines, or only the environments, are at work."""
GLANCE_S = 0.01
"""Seconds to wait for environments before looking at the engines again, while both are at work."""
GATHER_S = 0.1
"""Seconds that a turn may wait to be requested together with later turns: engines are faster with many at a time."""


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
            more: Whether the step has more conversations that did not fail: then all of these may fail without error.

        Raises:
            DataError: The environment fails for every response, or for all of the first ones.
        """
        conversations = [conversation for group in begun for conversation in group]
        while self._under_way(conversations):
            self._go_on()
        for conversation in conversations:
            del self._begun[conversation.number]
        if not more:
            check_hope([one for one in conversations if one.failure is not None], len(conversations))
        return [[conversation.response() for conversation in group] for group in begun]

    def finish_in_flight(self) -> None:
        """Finish all conversations that were begun, as long as a replica has weights.

        Raises:
            DataError: The environment failed for every response so far.
        """
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
            assert not isinstance(answer, AgentResult), "no agent is run"
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
                check_hope([one for one in self._begun.values() if one.failure is not None], HOPELESS)
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
