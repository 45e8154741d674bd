"""Responses of one turn, or of several between which an environment speaks.

A turn is a request to the rollout engines like any other, whose prompt is all that the model has read and written so
far, token by token::

    prompt -> turn -> observation -> turn -> observation -> turn        conversation: one sample
              [own]   [not trained]  [own]   [not trained]  [own]       response mask

While some conversations wait for their environment, the engines work on others.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from anytron.engines.rollout_engine import PromptInputs
from anytron.errors import DataError
from anytron.isolation.failure import Failure
from anytron.rollout.conversation import Conversation
from anytron.rollout.observations import observation_tokens
from anytron.rollout.pool import response_seed
from anytron.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.config.generation import EnvironmentSection
    from anytron.config.schema import RunConfig
    from anytron.data.prompts import TokenizedPrompt
    from anytron.engines.rollout_engine import Response, SamplingParams
    from anytron.environments import Observation
    from anytron.environments.pool import EnvironmentPool
    from anytron.preflight.prepare import PreparedRun
    from anytron.rollout.pool import Generation, RolloutPool

POLL_S = 1.0
"""How long to wait where only one side is at work."""
GLANCE_S = 0.01
"""How long to wait for environments before looking at the engines again, while both are at work."""
GATHER_S = 0.1
"""How long a turn may wait for others that begin soon: engines are fast with many at a time."""
HOPELESS = 16
"""So many conversations that fail, when no environment has answered, are the environment's fault, not theirs."""


class SingleTurns:
    """Responses of one turn.

    Args:
        pool: Makes them.
        sampling: How they are sampled.
    """

    def __init__(self, pool: RolloutPool, sampling: SamplingParams) -> None:
        self._pool, self._sampling = pool, sampling

    def begin(self, prompts: Sequence[TokenizedPrompt], samples_per_prompt: int, seed: int) -> Generation:
        """Ask for responses to each prompt; see :meth:`RolloutPool.begin`."""
        inputs = [PromptInputs(prompt.tokens, prompt.patches) for prompt in prompts]
        return self._pool.begin(inputs, self._sampling, samples_per_prompt, seed)

    def finish(self, begun: Generation) -> list[list[Trajectory]]:
        """Wait for responses; give those to each prompt, in order."""
        return [[Trajectory.of(response) for response in group] for group in self._pool.finish(begun)]


class Conversations:
    """Responses of several turns. None is left unfinished: a step holds all of each.

    Args:
        pool: Makes the turns.
        prepared: The tokenizer, the sampling, the model's limits.
        environments: What answers the turns.
        section: The limits of conversations.
    """

    def __init__(
        self, pool: RolloutPool, prepared: PreparedRun, environments: EnvironmentPool, section: EnvironmentSection
    ) -> None:
        self._pool, self._prepared, self._environments, self._section = pool, prepared, environments, section
        self._tokenizer: Any = prepared.tokenizer

    def begin(self, prompts: Sequence[TokenizedPrompt], samples_per_prompt: int, seed: int) -> list[list[Conversation]]:
        """Begin the conversations about each prompt: environments are asked for what comes first."""
        asked = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
        conversations = [Conversation(prompt, response_seed(seed, place)) for place, prompt in enumerate(asked)]
        for conversation in conversations:
            conversation.number = self._environments.begin(conversation.task)
        starts = range(0, len(conversations), samples_per_prompt)
        return [conversations[start : start + samples_per_prompt] for start in starts]

    def finish(self, begun: Sequence[Sequence[Conversation]]) -> list[list[Trajectory]]:
        """Go on with conversations until the last is over; give those about each prompt, in order.

        Raises:
            DataError: The environment fails for every response, or for all of the first ones.
        """
        conversations = [conversation for group in begun for conversation in group]
        self._run(conversations)
        _check_hope(conversations, answered=True)
        return [[conversation.trajectory() for conversation in group] for group in begun]

    def _run(self, conversations: Sequence[Conversation]) -> None:
        """Go on with all of them until the last is over."""
        heard = {conversation.number: conversation for conversation in conversations}
        answered = False
        ready, since = list(conversations), 0.0  # that the model speaks next, and since when the first of them waits
        speaking: dict[int, Conversation] = {}
        while ready or speaking or self._environments.busy:
            if ready and (not self._environments.busy or monotonic() - since > GATHER_S):
                ready = [one for one in ready if not one.over]
                questions = [one.question(self._prepared.sampling, self._room(one)) for one in ready]
                speaking |= dict(zip(self._pool.ask(questions), ready, strict=True))
                ready = []
            if speaking:
                self._listen(speaking, 0.0 if self._environments.busy else POLL_S)
            waits = not speaking and not ready
            for number, answer in self._environments.poll(POLL_S if waits else GLANCE_S):
                conversation = heard[number]
                if isinstance(answer, Failure):
                    conversation.end(finished=False, failure=answer)
                    _check_hope(conversations, answered=answered)
                else:
                    answered = True
                    self._answer(conversation, answer)
                    if not conversation.over:
                        since = since if ready else monotonic()
                        ready.append(conversation)

    def _listen(self, speaking: dict[int, Conversation], seconds: float) -> None:
        """Take the turns that are done, and give them to their environments."""
        for number, response in self._pool.poll(seconds):
            conversation = speaking.pop(number)
            turn = conversation.add_turn(response, self._decoded(response))
            if not conversation.over:  # its environment may have failed in the meantime
                self._environments.step(conversation.number, turn)

    def _decoded(self, response: Response) -> str:
        text: str = self._tokenizer.decode(list(response.tokens), skip_special_tokens=True)
        return text

    def _answer(self, conversation: Conversation, observation: Observation) -> None:
        """Add an observation to a conversation, and end it if there is nothing more to say, or no room."""
        conversation.count(observation)
        if observation.done or len(conversation.turns) == self._section.max_turns:
            self._end(conversation, finished=observation.done)
            return
        last = conversation.tokens[-1] if conversation.tokens else None
        tokens = observation_tokens(observation, last, self._tokenizer, self._prepared.vocab_size)
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
    """Choose how a run's responses are made."""
    if config.environment is None or environments is None:
        return SingleTurns(pool, prepared.sampling)
    return Conversations(pool, prepared, environments, config.environment)


def _check_hope(conversations: Sequence[Conversation], *, answered: bool) -> None:
    """End the run if environments fail for all, or for the first ones before any has ``answered``."""
    failed = [one for one in conversations if one.failure is not None]
    if len(failed) == len(conversations) or (len(failed) >= HOPELESS and not answered):
        failure = failed[0].failure
        assert failure is not None, "these have failed"
        raise DataError(
            failure.what,
            where=f"environment, prompt {failed[0].prompt.id} (for every sample so far)",
            why=failure.why,
            fix=failure.fix,
        )
