"""Conversations of several turns whose tokens, or the experts of their tokens, are not those of the rollout."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.corpus.fault import Fault, in_place_of

PLACE = "anytron.run.rollout.conversation"


class EachToolMessageItsOwnTurn(Fault):
    """Results of tools are rendered one by one, each with the boundaries of a turn."""

    run, rule = "tools", "conversations"

    @staticmethod
    @in_place_of(f"{PLACE}:_rendered", role="driver")
    def one_by_one(original, messages, *arguments):
        return "".join(original([message], *arguments) for message in messages)


class TurnsDecodedAndTokenisedAgain(Fault):
    """A turn's text is tokenised again, which gives other tokens than were sampled."""

    run, rule = "tools", "conversations"

    @staticmethod
    @in_place_of(f"{PLACE}s:Conversations._listen", role="driver")
    def listen(original, self, seconds, *others):
        poll = self._pool.poll
        self._pool.poll = lambda *arguments: [(number, again(one, self._tokenizer)) for number, one in poll(*arguments)]
        try:
            original(self, seconds, *others)
        finally:
            self._pool.poll = poll


def again(response, tokenizer):
    """Tokenise a response's text; its log-probs stay in their places."""
    text = tokenizer.decode(list(response.tokens), skip_special_tokens=True)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"][: len(response.tokens)]
    kept = {name: list(getattr(response, name))[: len(tokens)] for name in ("log_probs", "versions")}
    return replace(response, tokens=tokens, **kept)


class ExpertRoutesAppendedTwiceAfterAResume(Fault):
    """The experts of a later turn, which are those of the whole sequence, are appended to the earlier ones."""

    run, rule = "tools-and-routes", "conversations"

    @staticmethod
    @in_place_of(f"{PLACE}:longer_routing", role="driver")
    def appended(original, known, told):
        return told if known is None or told is None else torch.cat([known, told])[: len(told)]
