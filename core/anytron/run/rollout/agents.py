"""Responses of agents: programs that talk to the model by HTTP, each in a session of its own.

An agent's messages become token ids in the server (:mod:`anytron.serving`), which keeps what the model wrote. When the
agent has ended, its session is one sample::

    prompt -> turn -> messages -> turn -> messages -> turn
              [own]   [given]     [own]   [given]     [own]       response mask

A session may hold several conversations, such as those of sub-agents, and conversations may branch. The response is
the conversation of the last answer, and the others are its
:attr:`~anytron.workers.engines.rollout_engine.Response.others`. All have the session's reward. A turn that two branches
have is the model's own in one of them, so that it is trained once::

    prompt -> turn -> messages -> turn           the response
              [own]   [given]     [own]
    prompt -> turn -> messages -> turn           another, which branches off after the first turn
              [given] [given]     [own]
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING

from anytron.base.seeds import derive_seed, response_seed
from anytron.run.rollout.conversation import HOPELESS, check_hope
from anytron.serving.sessions import Reward, Terms
from anytron.task.environments.protocol import AgentResult, AgentTask, Outcome
from anytron.task.isolation.failure import Failure
from anytron.workers.engines.rollout_engine import Response

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anytron.config.generation import EnvironmentSection
    from anytron.run.preflight.prepare import PreparedRun
    from anytron.run.rollout.pool import RolloutPool
    from anytron.serving.endpoint import Endpoint
    from anytron.serving.sessions import Branch, Session
    from anytron.task.data.prompts import TokenizedPrompt
    from anytron.task.environments.pool import EnvironmentPool
    from anytron.workers.engines.rollout_engine import StopReason
    from anytron.workers.executor.protocol import Pending

GLANCE_S = 0.01
"""Seconds to wait for the engines, or for results of agents, before looking at the others again."""
ABSENT_S = 0.5
"""Seconds without the driver that agents get in addition to their time."""
LIMITS = ("too_many_turns", "context_length_exceeded")
"""Codes of refusals that end a response as limits do, and not as failures do."""


@dataclass(eq=False)
class Episode:
    """One response of an agent.

    Attributes:
        prompt: The prompt of the response.
        seed: Seed of everything random in it.
        attempts: Times that the agent has been started.
        session: The session of the current attempt; None before the first.
        response: The whole response; None until the agent has ended.
        failure: Why the last attempt failed; None if it did not.
    """

    prompt: TokenizedPrompt
    seed: int
    attempts: int = 0
    session: Session | None = None
    response: Response | None = None
    failure: Failure | None = None


class Agents:
    """Responses of agents.

    Args:
        pool: The rollout engines, which also take the requests of the endpoint.
        prepared: Sampling parameters.
        environments: The processes in which agents run.
        endpoint: The server by which agents reach the model.
        section: Section ``environment``, which limits agents.
    """

    def __init__(
        self,
        pool: RolloutPool,
        prepared: PreparedRun,
        environments: EnvironmentPool,
        endpoint: Endpoint,
        section: EnvironmentSection,
    ) -> None:
        self._pool, self._environments, self._endpoint, self._section = pool, environments, endpoint, section
        self._prepared = prepared
        self._begun: list[Episode] = []
        self._waiting: deque[Episode] = deque()
        self._running: dict[int, Episode] = {}  # by the numbers of their calls
        self._succeeded = False
        self._failure: Exception | None = None
        self._seen = monotonic()

    def begin(self, prompts: Sequence[TokenizedPrompt], samples_per_prompt: int, seed: int) -> list[list[Episode]]:
        """Queue an agent for each response to each prompt."""
        asked = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
        episodes = [Episode(prompt, response_seed(seed, place)) for place, prompt in enumerate(asked)]
        self._begun += episodes
        self._waiting += episodes
        starts = range(0, len(episodes), samples_per_prompt)
        return [episodes[start : start + samples_per_prompt] for start in starts]

    def finish(self, begun: Sequence[Sequence[Episode]], *, more: bool = False) -> list[list[Response]]:
        """Wait until agents have ended; return the responses to each prompt, in order.

        Args:
            begun: The responses that :meth:`begin` returned.
            more: Whether the step has further responses that did not fail: then all of these may fail without an error.

        Raises:
            DataError: The agent fails for every response, or for all of the first ones.
        """
        episodes = [episode for group in begun for episode in group]
        while self._under_way(episodes):
            self._go_on()
        over = {id(episode) for episode in episodes}
        self._begun = [episode for episode in self._begun if id(episode) not in over]
        if not more:
            check_hope([one for one in episodes if one.failure is not None], len(episodes))
        return [[_response(episode) for episode in group] for group in begun]

    def finish_in_flight(self) -> None:
        """Finish all responses that were begun, as long as a replica has weights.

        Raises:
            DataError: The environment failed for every response so far.
        """
        while self._pool.has_weights and self._under_way(self._begun):
            self._go_on()

    def attend(self, call: Pending) -> None:
        """Continue responses until a call of the training ranks is over.

        An error meanwhile is raised by the next :meth:`finish` or :meth:`finish_in_flight`.
        """
        try:
            while not call.done:
                self._go_on(call)
        except Exception as failure:  # noqa: BLE001 - the training ranks are not left in the middle of their call
            self._failure = failure

    def _under_way(self, episodes: Iterable[Episode]) -> bool:
        return self._failure is not None or any(one.response is None for one in episodes)

    def _go_on(self, *others: Pending) -> None:
        """Start agents, pass their requests to the engines, and take the results of agents that have ended."""
        if self._failure is not None:
            raise self._failure
        self._endpoint.check()
        while self._waiting and len(self._running) < self._section.processes:
            self._start(self._waiting.popleft())
        busy = self._endpoint.desk.busy
        self._pool.poll(GLANCE_S if busy or others else 0.0, *others)
        if (absent := monotonic() - self._seen) > ABSENT_S:  # scoring rewards, for example: no request was answered
            self._environments.postpone(absent)
        for number, answer in self._environments.poll(0.0 if busy else GLANCE_S):
            assert isinstance(answer, (AgentResult, Failure)), "only agents are run"
            self._take(self._running.pop(number), answer)
        self._seen = monotonic()

    def _start(self, episode: Episode) -> None:
        """Begin a session, and start an agent with its key."""
        seed = derive_seed(episode.seed, "attempt", episode.attempts) if episode.attempts else episode.seed
        episode.attempts += 1
        turns, endpoint, prompt = self._section.max_turns, self._endpoint, episode.prompt
        episode.session, key = endpoint.begin(Terms(seed, turns, self._prepared.sampling))
        own = derive_seed(seed, "environment", 0)
        task = AgentTask(prompt.id, prompt.text, dict(prompt.data), own, turns, endpoint.url, key, endpoint.model.name)
        self._running[self._environments.run(task)] = episode

    def _take(self, episode: Episode, answer: AgentResult | Failure) -> None:
        """End an agent's session; make its response, or start the agent again."""
        session = episode.session
        assert session is not None, "the agent was started"
        self._endpoint.end(session)
        limited = isinstance(answer, Failure) and not answer.ends and any(session.counts[code] for code in LIMITS)
        if limited and session.turns:
            answer = AgentResult(0.0 if session.reward is None else session.reward.reward)
        outcome = _outcome(session, answer)
        if isinstance(outcome, Failure):
            if episode.attempts < self._section.attempts:
                self._waiting.append(episode)
                return
            episode.failure = outcome
        else:
            self._succeeded = True
        episode.response = self._whole(session, outcome, finished=not limited)
        if not self._succeeded:
            check_hope([one for one in self._begun if one.failure is not None], HOPELESS)

    def _whole(self, session: Session, outcome: Reward | Failure, *, finished: bool) -> Response:
        """Return a session as one response, also if it failed."""
        reason: StopReason = "stop" if finished and not isinstance(outcome, Failure) else "length"
        branches = list(session.branches())
        turns = branches[0].turns if branches else ()
        texts = tuple(self._endpoint.model.decode(turn.response.tokens) for turn in turns) or ("",)
        if isinstance(outcome, Failure):
            found = Outcome(texts, 0.0, {}, outcome)
        else:
            found = Outcome(texts, outcome.reward, outcome.metrics)
        if not branches:
            return Response((), (), reason, (), None, (), found)
        others = tuple(_conversation(branch, reason) for branch in branches[1:] if any(branch.mask))
        return replace(_conversation(branches[0], reason), environment=found, others=others)


def _conversation(branch: Branch, reason: StopReason) -> Response:
    """Return a conversation of an agent without its outcome; what it shares with an earlier one is given."""
    prompt, mask = branch.prompt, branch.mask
    versions = [version for version, own in zip(branch.versions, mask, strict=True) if own and version is not None]
    log_probs = [log_prob if own else 0.0 for log_prob, own in zip(branch.log_probs, mask, strict=True)]
    begin = len(prompt)
    return Response(
        branch.tokens[begin:],
        log_probs[begin:],
        reason,
        versions,
        branch.routing,
        response_mask=mask[begin:],
        prompt=prompt,
        images=branch.images,
    )


def _outcome(session: Session, answer: AgentResult | Failure) -> Reward | Failure:
    """Return the reward of a session that has ended, or why it cannot be trained on."""
    if not session.turns and session.counts["context_length_exceeded"]:
        return Failure(
            "An agent's first request is too long for the model.",
            "its messages leave no room for an answer in the model's context",
            "shorten the messages and the descriptions of tools, or choose a model with a longer context",
        )
    if isinstance(answer, Failure):
        return answer
    if not session.turns:
        return Failure(
            "An agent did not ask the model anything.",
            f"its session has no answer; requests: {dict(session.counts) or 'none'}",
            "let it use task.base_url, task.api_key and task.model; a program has them in the variables "
            "OPENAI_BASE_URL, OPENAI_API_KEY and ANYTRON_MODEL",
        )
    sent = session.reward
    if answer.reward is None and sent is None:
        return Failure(
            "An agent gave no reward.",
            "no reward was returned by a function, or sent to its session",
            "return a number from the function; or send it, as a program must: POST /reward below the base URL "
            '(task.base_url, OPENAI_BASE_URL) with {"reward": 1.0} and the session\'s key',
        )
    reward = answer.reward if sent is None or answer.reward is not None else sent.reward
    assert reward is not None, "one of the two is given"
    return Reward(reward, {**({} if sent is None else sent.metrics), **answer.metrics})


def _response(episode: Episode) -> Response:
    assert episode.response is not None, "it was waited for"
    return episode.response
