"""Recorded conversations as token ids: a tree of turns for each session.

**Every token that is marked as sampled is the token that an engine sampled.** A turn of the model is stored as the
engine returned it and is never tokenised again. A later request continues a recorded turn only if it repeats what the
server answered; only what is new in it becomes new tokens. A history that the session has not recorded is refused and
counted.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from anytron.base.packed import Packed
from anytron.base.seeds import derive_seed
from anytron.config.json_files import strings
from anytron.serving.conversation import extended, rendered
from anytron.serving.refusal import Refusal
from anytron.task.data.images import joined_images

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from anytron.serving.conversation import Conversation
    from anytron.task.data.images import ImagePatches
    from anytron.workers.engines.rollout_engine import Response, SamplingParams

TURN = 6 << 10
"""Bytes of a turn besides its tokens and texts."""
NUMBERS = 32
"""Bytes of a sampled token: its id, its log-prob, and the version of its weights."""
SHOWN = 60
"""Letters of a message that an error shows."""


@dataclass(frozen=True, eq=False)
class Turn:
    """One turn of the model, and the tokens that were given to the model before it.

    Attributes:
        before: The turn that this one continues; None at the beginning of a conversation.
        given: Tokens between the turn before and this one: a prompt, tool results, a user's message.
        response: What the engine sampled, unchanged.
        length: Number of tokens from the beginning of the conversation to the end of this turn.
        message: The assistant's message that the client received; None on a route of token ids.
        images: The images whose tokens are in ``given``; None if there are none.
        routing: The experts of this turn's tokens, given ones included, and of the token before them; without the last
            token (:attr:`~anytron.workers.engines.rollout_engine.Response.routing`). None if it is not recorded.
    """

    before: Turn | None
    given: Sequence[int]
    response: Response
    length: int
    message: Mapping[str, Any] | None = None
    images: ImagePatches | None = None
    routing: Tensor | None = None

    def path(self) -> list[Turn]:
        """Return the turns from the beginning of the conversation to this one."""
        turns: list[Turn] = []
        one: Turn | None = self
        while one is not None:
            turns.append(one)
            one = one.before
        return turns[::-1]

    def tokens(self) -> tuple[int, ...]:
        """Return all tokens from the beginning of the conversation to the end of this turn."""
        return tuple(token for turn in self.path() for part in (turn.given, turn.response.tokens) for token in part)


@dataclass(frozen=True)
class Branch:
    """A conversation from its beginning to a turn that no other turn continues.

    Attributes:
        turns: The turns of the conversation, one or more.
        tokens: Token ids of the whole conversation, ``[T]``.
        mask: For each token, whether it was sampled and is not marked in an earlier branch of the session, ``[T]``.
            So over all branches each sampled token is marked once.
        log_probs: Log-prob of each sampled token as the engine returned it; 0 for given tokens, ``[T]``.
        versions: Version of the weights that sampled each token; None for given tokens, ``[T]``.
    """

    turns: tuple[Turn, ...]
    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int | None, ...]

    @property
    def routing(self) -> Tensor | None:
        """The experts of each token except the last, ``[T - 1, L, K]``; None if they are not recorded."""
        parts = [turn.routing for turn in self.turns if turn.routing is not None]
        return torch.cat(parts) if len(parts) == len(self.turns) else None

    @property
    def images(self) -> ImagePatches | None:
        """The images of the conversation."""
        return joined_images(turn.images for turn in self.turns)

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the first turn."""
        return tuple(self.turns[0].given)


@dataclass(frozen=True)
class Terms:
    """What a run requires of a session that it trains on.

    Attributes:
        seed: Seed of the session's first answer, from which the seeds of later answers are derived.
        max_turns: Most answers.
        sampling: Sampling parameters of each answer; a request may only lower ``max_new_tokens`` and choose ``stop``.
    """

    seed: int
    max_turns: int
    sampling: SamplingParams


@dataclass(frozen=True)
class Reward:
    """What a client says that its session is worth.

    Attributes:
        reward: The reward.
        metrics: Numbers for the run's metrics.
    """

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class Session:
    """The conversations of one client, which only this client's key and the server's key can read.

    Attributes:
        id: Name of the session.
        terms: What a run requires of the session; None = no run trains on it.
        turns: All recorded turns, in order of their answers.
        counts: Number of requests by outcome: ``answered``, ``aborted`` (the client left), or the code of the refusal.
        size: Number of recorded tokens.
        recorded: Bytes of what is recorded, at most.
        in_progress: Bytes of the session's requests that are being answered, at most.
        reward: The last reward that the client has sent; None = it has sent no reward.
        ended: Whether nothing more may be recorded.
    """

    id: str
    terms: Terms | None = None
    turns: list[Turn] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    size: int = 0
    recorded: int = 0
    in_progress: int = 0
    reward: Reward | None = None
    ended: bool = False
    _asked_at: Counter[int] = field(default_factory=Counter)
    _expected: int = 0
    _ends: dict[bytes, Turn] = field(default_factory=dict)
    _asked: dict[bytes, Turn] = field(default_factory=dict)
    _given: set[bytes] = field(default_factory=set)
    _lengths: dict[int, dict[bytes, Turn]] = field(default_factory=dict)

    def find(self, conversation: Conversation) -> tuple[Turn | None, int]:
        """Find the recorded turn that a chat request continues.

        Returns:
            The turn, and the number of messages that it covers; (None, 0) = the request begins a conversation.

        Raises:
            Refusal: The request has an assistant's message that this session has not recorded at this place. The only
                exceptions are examples, which stand before the first turn of the model, in the session's first request
                and unchanged in later ones.
        """
        places = conversation.assistants()
        for place in reversed(places):
            if (turn := self._ends.get(conversation.keys[place + 1])) is not None:
                if (later := conversation.assistants(place + 1)) != []:
                    raise self._unknown(conversation, later[0])
                return turn, place + 1
        for place in places:
            if self.turns and _alone(conversation.messages[place]) not in self._given:
                raise self._unknown(conversation, place)
        return None, 0

    def find_tokens(self, tokens: Sequence[int]) -> tuple[Turn | None, int]:
        """Find the recorded turn whose conversation is the longest prefix of the tokens.

        Returns:
            The turn, and the number of tokens that it covers; (None, 0) = the tokens begin a conversation, and none of
            them counts as sampled.
        """
        found: tuple[Turn | None, int] = (None, 0)
        digest, done = hashlib.sha256(), 0
        for length in sorted(one for one in self._lengths if one <= len(tokens)):
            digest.update(array("q", tokens[done:length]).tobytes())
            done = length
            if (turn := self._lengths[length].get(digest.digest())) is not None:
                found = turn, length
        return found

    def seed_after(self, turn: Turn | None) -> int | None:
        """Return the seed of the next answer after ``turn``; None if no run trains on the session.

        ``turn`` None = the answer begins a conversation. The first answer after a turn has the seed that the turn of an
        environment would have there; further answers after the same turn have other seeds.
        """
        if self.terms is None:
            return None
        place, depth = 0 if turn is None else id(turn), 0 if turn is None else len(turn.path())
        again, self._asked_at[place] = self._asked_at[place], self._asked_at[place] + 1
        seed = self.terms.seed if not depth else derive_seed(self.terms.seed, "turn", depth)
        return derive_seed(seed, "again", again) if again else seed

    @contextlib.contextmanager
    def answering(self, count: int) -> Iterator[None]:
        """Count ``count`` answers against the session's limit inside the ``with`` block, in which they are generated.

        Raises:
            Refusal: The session would have more answers than its terms allow.
        """
        if self.terms is not None and len(self.turns) + self._expected + count > self.terms.max_turns:
            why = f"environment.max_turns allows {self.terms.max_turns} answers in a session"
            raise Refusal(403, "too_many_turns", f"The model answers no more in this session: {why}.")
        self._expected += count
        try:
            yield
        finally:
            self._expected -= count

    def record(
        self,
        before: Turn | None,
        given: Sequence[int],
        response: Response,
        conversation: Conversation | None = None,
        message: Mapping[str, Any] | None = None,
        images: ImagePatches | None = None,
    ) -> Turn:
        """Record an answer.

        Args:
            before: The turn that the request continued.
            given: The tokens after that turn, up to the answer.
            response: The answer, as the engine returned it.
            conversation: The chat request; None on a route of token ids.
            message: The assistant's message that the client receives.
            images: The images whose tokens are in ``given``.
        """
        size = len(given) + len(response.tokens)
        length = size + (0 if before is None else before.length)
        routing = response.routing
        if routing is not None:
            known = 0 if before is None else before.length - 1
            routing = routing[known:].clone() if self.terms is not None else None  # only a run reads it
            response = replace(response, routing=None)
        turn = Turn(before, Packed("i", given), response, length, message, images, routing)
        self.turns.append(turn)
        self.size += size
        said = () if message is None else strings(message)
        self.recorded += bytes_of_turn(len(given), len(response.tokens), sum(len(text) for _, text in said), images)
        self.recorded += 0 if routing is None else routing.nbytes
        self.counts["answered"] += 1
        self._lengths.setdefault(length, {})[hashlib.sha256(array("q", turn.tokens()).tobytes()).digest()] = turn
        if conversation is not None and message is not None:
            self._ends[extended(conversation.keys[-1], message)] = turn
            self._asked[conversation.keys[-1]] = turn
            if before is None:
                self._given |= {_alone(conversation.messages[place]) for place in conversation.assistants()}
        return turn

    def branches(self) -> Iterator[Branch]:
        """Yield each branch of the session: that of the last answer, then the others in the order of their last turns.

        A turn that several branches have is marked in the first one that is yielded.
        """
        continued = {id(turn.before) for turn in self.turns}
        marked: set[int] = set()
        for leaf in (*self.turns[-1:], *self.turns[:-1]):
            if id(leaf) in continued:
                continue
            path = leaf.path()
            yield _branch(path, marked)
            marked |= {id(turn) for turn in path}

    def _unknown(self, conversation: Conversation, place: int) -> Refusal:
        """Explain why an assistant's message cannot be matched."""
        sent = str(rendered(conversation.messages[place])["content"])
        wrote = self._asked.get(conversation.keys[place])
        if wrote is not None and wrote.message is not None:
            ours = str(wrote.message.get("content") or "")
            same = next((at for at, pair in enumerate(zip(sent, ours, strict=False)) if len(set(pair)) > 1), None)
            same = min(len(sent), len(ours)) if same is None else same
            why = (
                f"the server wrote another message there: from character {same} on, {sent[same : same + SHOWN]!r} was "
                f"sent and {ours[same : same + SHOWN]!r} was written, or their tool calls differ"
            )
        else:
            why = "the server has written no message after exactly the messages, tools and template arguments before"
        return Refusal(
            409,
            "history_not_recorded",
            f"messages[{place}] is an assistant's message that this session has not recorded: {why}. Send each answer "
            "back unchanged, thoughts and tool calls included; or begin another session.",
            f"messages[{place}]",
        )


def bytes_of_turn(given: int, answered: int, letters: int, images: ImagePatches | None) -> int:
    """Return the bytes of a recorded turn, at most.

    Args:
        given: Number of given tokens.
        answered: Number of sampled tokens.
        letters: Letters of the assistant's message.
        images: The turn's images.
    """
    return TURN + 4 * given + NUMBERS * answered + 4 * letters + (0 if images is None else images.nbytes)


def _alone(message: Mapping[str, Any]) -> bytes:
    return extended(b"", message)


def _branch(path: Sequence[Turn], marked: set[int]) -> Branch:
    tokens: list[int] = []
    mask: list[bool] = []
    log_probs: list[float] = []
    versions: list[int | None] = []
    for turn in path:
        given, response = turn.given, turn.response
        tokens += [*given, *response.tokens]
        mask += [False] * len(given) + [id(turn) not in marked] * len(response.tokens)
        log_probs += [0.0] * len(given) + list(response.log_probs)
        versions += [*[None] * len(given), *response.versions]
    return Branch(tuple(path), tuple(tokens), tuple(mask), tuple(log_probs), tuple(versions))
