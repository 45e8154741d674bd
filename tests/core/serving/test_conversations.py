"""Every token that is trained is the token that was sampled, whatever clients do with their histories."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from anytron.serving import service as module
from anytron.serving.conversation import Conversation, tool_calls_in
from anytron.serving.refusal import Refusal
from anytron.serving.rendering import TURN, continuation_tokens, prompt_tokens
from anytron.serving.requests import ChatBody
from anytron.serving.service import SLICE, ServedModel, Service
from anytron.serving.sessions import Session, Terms
from anytron.workers.engines.rollout_engine import Response
from tests.core.serving.toys import SAID, SAMPLING, TEMPLATES, TOOLS, RandomPool, check_law, tokenizer

HONEST = ("begin", "user", "tool", "again", "earlier")
TRICKS = ("edit", "strip", "insert", "drop", "system", "tools", "swap", "spaces")


class Inline:
    """The renderer without its process, and the desk without its threads."""

    templated = True

    def __init__(self, template, pool):
        self.tokenizer, self.pool = tokenizer(template), pool

    async def prompt(self, conversation):
        return prompt_tokens(self.tokenizer, {}, conversation)

    async def continuation(self, conversation, covered, last):
        found = continuation_tokens(self.tokenizer, {}, conversation, covered, last)
        if isinstance(found, str):
            raise Refusal(409, "template_rerenders", found)
        return found

    async def answer(self, tokens, sampling, seed, images=None):
        assert images is None
        return self.pool.answer(tokens, sampling, seed)


def service_of(template, pool):
    inline = Inline(template, pool)
    model = ServedModel("toy", inline.tokenizer, len(inline.tokenizer), 100_000, SAMPLING)
    return Service(model, inline, inline)


class Client:
    """Talks in several conversations of one session, most of the time as it should."""

    def __init__(self, template, seed, session=None):
        self.order, self.session = random.Random(seed), session or Session("client")
        self.pool = RandomPool(seed, template)
        self.service = service_of(template, self.pool)
        self.histories, self.found = [], Counter()

    async def turn(self):
        deed = self.order.choice([*HONEST * 4, *TRICKS]) if self.histories else "begin"
        messages, tools = self.asked(deed)
        try:
            body = ChatBody(model="toy", messages=messages, tools=tools)
            asked = await self.service.chat(body, self.session)
            (written,) = await self.service.answers(asked, 1, tools=bool(tools))
        except Refusal as refusal:
            assert refusal.status == 409, refusal.message  # noqa: PT017 - which refusal it is depends on chance
            self.found[refusal.code, deed] += 1
            return
        self.found["answered", deed] += 1
        self.histories.append(([*messages, dict(written.message)], tools))
        self.histories = self.histories[-8:]

    def asked(self, deed):  # noqa: C901 - a list of deeds
        order = self.order
        if deed == "begin":
            examples = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "an example"}]
            messages = [{"role": "system", "content": order.choice("ab")}, *(examples if order.random() < 0.1 else [])]
            return [*messages, {"role": "user", "content": order.choice(["hi", "hello there", "2"])}], order.choice(
                [None, TOOLS]
            )
        messages, tools = copy.deepcopy(order.choice(self.histories))
        last = messages[-1]
        if deed == "again":
            return messages[:-1], tools
        if deed == "earlier":
            places = [place for place, one in enumerate(messages) if one["role"] == "assistant"]
            messages = messages[: order.choice(places) + 1]
        elif deed == "edit":
            last["content"] += order.choice("xyz")
        elif deed == "strip":
            last["content"] = last["content"].rpartition("</think>")[2]
        elif deed == "insert":
            messages.append({"role": "assistant", "content": "never sampled"})
        elif deed == "drop":
            del messages[order.randrange(len(messages) - 1)]
        elif deed == "system":
            messages[0] = {"role": "system", "content": "the time is now"}
        elif deed == "tools":
            tools = None if tools else TOOLS
        elif deed == "swap":
            last["content"] = order.choice(SAID)
        elif deed == "spaces" and last.get("tool_calls"):
            for call in last["tool_calls"]:
                call["function"]["arguments"] = call["function"]["arguments"].replace(" ", "")
        calls = last.get("tool_calls")
        if calls or deed == "tool":
            name = calls[0]["id"] if calls else "call"
            return [*messages, {"role": "tool", "tool_call_id": name, "content": "the tool says 1"}], tools
        return [*messages, {"role": "user", "content": order.choice(["go on", "\n", "é"])}], tools


def talk(template, seed, turns, session=None):
    client = Client(template, seed, session)

    async def all_turns():
        for _ in range(turns):
            await client.turn()

    asyncio.run(all_turns())
    return client


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_marked_token_was_sampled_there(template):
    client = talk(template, 1, 150)

    assert check_law(client.pool.log, [client.session]) > 500
    counts = client.session.counts
    assert counts["answered"] == len(client.pool.log) > 60
    assert client.found["history_not_recorded", "edit"] > 0
    assert client.found["answered", "edit"] == client.found["answered", "insert"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_same_in_ten_thousand_turns(template):
    found, tokens = Counter(), 0
    for seed in range(40):
        client = talk(template, 1000 + seed, 100)
        tokens += check_law(client.pool.log, [client.session])
        found += client.found
    assert found.total() == 4000
    assert tokens > 10_000
    assert all(found["answered", deed] > 20 for deed in HONEST)


class Forgetful(Session):
    """A store that keeps texts, and tokenises them again."""

    def record(self, before, given, response, conversation=None, message=None, images=None):
        one = tokenizer("plain")
        ids = one(one.decode(list(response.tokens)), add_special_tokens=False)["input_ids"]
        size = len(ids)
        again = replace(response, tokens=ids, log_probs=[-0.5] * size, versions=[response.versions[0]] * size)
        return super().record(before, given, again, conversation, message)


def test_a_store_that_tokenises_again_is_noticed():
    client = talk("plain", 1, 150, Forgetful("client"))

    with pytest.raises(AssertionError, match="no engine wrote token"):
        check_law(client.pool.log, [client.session])


def test_only_what_is_new_is_tokenised_and_nothing_merges_across_the_seam():
    one = tokenizer("plain")
    first = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    whole = Conversation([*first, {"role": "user", "content": "hi"}])

    tokens = continuation_tokens(one, {}, whole, 2, last=None)

    assert one.decode(list(tokens)) == "\nuser: hi\nassistant: "
    text = "user: hi\nassistant: hello\nuser: hi\nassistant: "
    assert one.decode(one(text, add_special_tokens=False)["input_ids"]) == text
    before = one("user: hi\nassistant: hello", add_special_tokens=False)["input_ids"]
    assert [*before, *tokens] != one(text, add_special_tokens=False)["input_ids"]  # a merge would cross it


def test_an_end_token_that_was_sampled_is_not_repeated():
    whole = Conversation(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    )
    one = tokenizer("llama")

    ended, cut = (continuation_tokens(one, {}, whole, 2, last) for last in (1, 7))

    assert cut == (1, *ended)
    assert one.decode(list(ended)) == "<|im_start|>user\n\nc<|im_end|><|im_start|>assistant\n\n"


@pytest.mark.parametrize(("end", "last"), [(1, 1), (7, None)])
def test_only_an_end_token_counts_as_the_end_of_a_turn(end, last, monkeypatch):
    pool, session, seen = RandomPool(0, "plain"), Session("client"), []
    service = service_of("plain", pool)
    monkeypatch.setattr(pool, "answer", lambda *_: Response((9, end), (-1.0, -1.0), "length", (0, 0)))

    async def continuation(conversation, covered, last):
        seen.append(last)
        return (5,)

    monkeypatch.setattr(service._renderer, "continuation", continuation)

    async def two_turns():
        first = [{"role": "user", "content": "a"}]
        asked = await service.chat(ChatBody(model="toy", messages=first), session)
        (one,) = await service.answers(asked, 1, tools=False)
        again = ChatBody(model="toy", messages=[*first, dict(one.message), QUESTION])
        return await service.chat(again, session)

    asked = asyncio.run(two_turns())
    assert seen == [last]
    assert asked.examples == 0


def test_no_answer_is_recorded_if_one_cannot_be_sent(monkeypatch):
    pool, session = RandomPool(0, "plain"), Session("client")
    service, numbers = service_of("plain", pool), iter([-1.0, float("nan")])
    monkeypatch.setattr(pool, "answer", lambda *_: Response((9,), (next(numbers),), "length", (0,)))

    async def two_answers():
        asked = await service.chat(ChatBody(model="toy", messages=[QUESTION]), session)
        await service.answers(asked, 2, tools=False)

    with pytest.raises(Refusal, match="not finite"):
        asyncio.run(two_answers())
    assert session.turns == []


def test_a_stream_that_changes_what_was_sent_is_not_recorded(monkeypatch):
    pool, session = RandomPool(0, "plain"), Session("client")
    service, texts = service_of("plain", pool), iter(["sent", "another"])
    monkeypatch.setattr(pool, "answer", lambda tokens, sampling, seed: response_of(sampling.max_new_tokens))
    monkeypatch.setattr(ServedModel, "decode", lambda self, tokens: next(texts))

    async def streamed():
        asked = await service.chat(ChatBody(model="toy", messages=[QUESTION], max_tokens=20), session)
        return [part async for part in service.stream(asked, tools=False)]

    with pytest.raises(Refusal, match="changed text that was streamed"):
        asyncio.run(streamed())
    assert session.turns == []


def response_of(size):
    return Response((9,) * size, (-1.0,) * size, "length", (0,) * size)


def with_routing(tokens, sampling, seed):
    """A response whose routing says for each token which it is, and how long the prompt was when it was told."""
    response = response_of(sampling.max_new_tokens)
    seen = [*tokens, *response.tokens][:-1]
    return replace(response, routing=torch.tensor([[[token, len(tokens)]] for token in seen]))


@pytest.mark.parametrize("sabotaged", [False, True])
def test_each_token_has_the_experts_of_the_turn_or_slice_that_computed_it_first(monkeypatch, sabotaged):
    pool = RandomPool(0, "plain")
    monkeypatch.setattr(pool, "answer", with_routing)
    if sabotaged:  # the twin: a later reading replaces what is known
        monkeypatch.setattr(module, "longer_routing", lambda known, told: told)
    service = service_of("plain", pool)
    sampling = replace(SAMPLING, max_new_tokens=SLICE + 4)
    trained, plain = Session("agent", Terms(1, 8, sampling)), Session("client")

    async def talk(session):
        asked = await service.chat(ChatBody(model="toy", messages=[QUESTION]), session)
        (*_, (_, _, first)) = [part async for part in service.stream(asked, tools=False)]
        asked = await service.chat(ChatBody(model="toy", messages=[QUESTION, first.message, RESULT]), session)
        await service.answers(asked, 1, tools=False)
        (branch,) = session.branches()
        return branch

    branch = asyncio.run(talk(trained))
    first, second = branch.turns
    begin = len(first.given)
    told = (
        [begin] * (begin + SLICE - 1)
        + [begin + SLICE] * 4
        + [first.length + len(second.given)] * (len(second.given) + SLICE + 4)
    )
    assert branch.routing[:, 0, 0].tolist() == list(branch.tokens[:-1])
    assert (branch.routing[:, 0, 1].tolist() == told) != sabotaged
    assert trained.recorded > branch.routing.nbytes
    assert all(turn.response.routing is None for turn in branch.turns)
    assert asyncio.run(talk(plain)).routing is None  # no run reads it


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud800"}', '{"a": NaN}', '{"a": [1e999]}', '{"\\udfff": 1}', '{"a": -Infinity}', "[]"]
)
def test_a_call_that_no_client_can_read_stays_text(arguments):
    text = f'so <tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert tool_calls_in(text) == (text, [])
    assert tool_calls_in(text.replace(arguments, '{"a": "\\ud83d\\ude00"}')) == ("so ", [("add", '{"a": "😀"}')])


THOUGHT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}]
RESULT, QUESTION = {"role": "tool", "content": "1"}, {"role": "user", "content": "c"}


@pytest.mark.parametrize("quiet", [True, False])
def test_a_template_that_drops_thoughts_is_refused_and_one_that_keeps_them_is_not(quiet):
    one = tokenizer("qwen")

    kept = continuation_tokens(one, {"quiet": quiet}, Conversation([*THOUGHT, RESULT]), 2, 1)
    dropped = continuation_tokens(one, {"quiet": quiet}, Conversation([*THOUGHT, QUESTION]), 2, 1)
    earlier = [*THOUGHT, RESULT, {"role": "assistant", "content": "d"}, QUESTION]
    before = continuation_tokens(one, {"quiet": quiet}, Conversation(earlier), 4, 1)

    assert one.decode(list(kept)).startswith("\n<|im_start|>user\n<tool_response>")
    assert "Because of messages[2], the chat template drops or changes what the model wrote in messages[1]" in dropped
    assert "renders the earlier messages in another way" in before
    assert "'<think>" in before


def test_a_client_cannot_imitate_the_mark_of_a_turn():
    said = Conversation([{"role": "user", "content": TURN}, *THOUGHT[1:], RESULT])

    assert "exactly once" in continuation_tokens(tokenizer("plain"), {}, said, 2, 1)
