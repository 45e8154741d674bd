"""What clients get from the server, over a real socket."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import openai
import pytest

from anytron.serving.answers import completion_log_probs
from anytron.serving.refusal import Refusal
from anytron.serving.requests import ChatBody, check_engine, sampling_of
from anytron.serving.sessions import Terms
from anytron.workers.engines.rollout_engine import Response
from tests.core.serving.served import HELLO, KEY, text_of
from tests.core.serving.toys import END, SAMPLING, TOOLS, check_law, tokenizer


def test_the_openai_client_chats(one):
    with one.client() as client:
        assert [model.id for model in client.models.list()] == ["toy"]
        found = client.chat.completions.create(
            model="toy",
            messages=HELLO,
            logprobs=True,
            n=3,
            seed=5,
            max_tokens=50,
            extra_body={"return_token_ids": True},
        )
    sampled = [response for _, response in one.pool.log[-3:]]
    assert [choice.message.content for choice in found.choices] == [text_of(response.tokens) for response in sampled]
    for choice, response in zip(found.choices, sampled, strict=True):
        assert [entry.logprob for entry in choice.logprobs.content] == list(response.log_probs)
        assert choice.token_ids == list(response.tokens)
        assert choice.weight_versions == list(response.versions)
        assert choice.finish_reason == response.stop_reason
    prompt = tokenizer("qwen").apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    assert found.prompt_token_ids == prompt == list(one.pool.log[-1][0])
    assert found.usage.completion_tokens == sum(len(response.tokens) for response in sampled)


def test_models_say_how_long_a_conversation_may_be(one):
    assert one.ask("/v1/models").json()["data"][0]["max_model_len"] == 2000


def test_a_stream_has_whole_characters_and_the_same_text(fresh):
    text = "é€😀 the answer is  42\n\n" * 6 + "end"
    fresh.pool.script = tokenizer("qwen")(text)["input_ids"]
    with fresh.client() as client:
        stream = client.chat.completions.create(
            model="toy",
            messages=HELLO,
            stream=True,
            logprobs=True,
            max_tokens=500,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)

    parts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(parts) == text
    assert len(parts) == len(fresh.pool.log) > 3
    assert not any("\ufffd" in part for part in parts)
    assert any(len(part.encode()) % 3 for part in parts)
    sampled = [token for _, response in fresh.pool.log for token in response.tokens]
    assert sampled == [*fresh.pool.script, END]
    for place, (prompt, _) in enumerate(fresh.pool.log):  # each slice was generated after those before it
        before = [token for _, response in fresh.pool.log[:place] for token in response.tokens]
        assert list(prompt) == [*fresh.pool.log[0][0], *before]
    found = [entry.logprob for chunk in chunks if chunk.choices for entry in chunk.choices[0].logprobs.content]
    assert found == [number for _, response in fresh.pool.log for number in response.log_probs]
    assert chunks[-1].usage.completion_tokens == len(sampled)


def test_a_stream_of_a_session_is_one_turn(fresh):
    fresh.pool.script = tokenizer("qwen")("the answer is 42 " * 12)["input_ids"]
    name, key = fresh.session()
    with fresh.client(key) as client:
        list(client.chat.completions.create(model="toy", messages=HELLO, stream=True, max_tokens=500))
    (turn,) = fresh.ask(f"/v1/sessions/{name}").json()["turns"]
    sampled = [token for token, own in zip(turn["token_ids"], turn["mask"], strict=True) if own]
    assert sampled == [*fresh.pool.script, END]
    assert len(fresh.pool.log) > 1


def test_tools_are_offered_and_calls_are_found(fresh):
    fresh.pool.said = ['so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>']
    _, key = fresh.session()
    with fresh.client(key) as client:
        first = client.chat.completions.create(model="toy", messages=HELLO, tools=TOOLS).choices[0]
        (call,) = first.message.tool_calls
        assert (first.finish_reason, call.function.name, json.loads(call.function.arguments)) == (
            "tool_calls",
            "add",
            {"a": 1},
        )
        assert '"name": "add"' in tokenizer("qwen").decode(list(fresh.pool.log[0][0]))
        messages = [*HELLO, first.message, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
        chunks = list(client.chat.completions.create(model="toy", messages=messages, tools=TOOLS, stream=True))
    assert chunks[0].choices[0].delta.tool_calls[0].function.name == "add"
    (prompt, said), (second, _) = fresh.pool.log
    assert second[: len(prompt) + len(said.tokens)] == (*prompt, *said.tokens)
    assert "7" in tokenizer("qwen").decode(list(second[len(prompt) + len(said.tokens) :]))


def test_completions_take_text_and_token_ids(one):
    with one.client() as client:
        for prompt in ("hello", [5, 6, 7]):
            found = client.completions.create(model="toy", prompt=prompt, logprobs=0, stop=["the"]).choices[0]
            tokens, response = one.pool.log[-1]
            assert tokens == tuple(tokenizer("qwen")(prompt)["input_ids"] if prompt == "hello" else prompt)
            assert found.text == text_of(response.tokens).partition("the")[0]
            assert found.logprobs.token_logprobs == list(response.log_probs)
        parts = [chunk.choices[0].text for chunk in client.completions.create(model="toy", prompt="hi", stream=True)]
    assert "".join(parts)


def test_the_token_route_answers_as_vllm_does(fresh):
    """The request and the answer are those of the training client of verifiers 0.4."""

    def generate(ids):
        sampling = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 20, "stop_token_ids": [9], "logprobs": 1}
        body = {"model": "toy", "token_ids": ids, "sampling_params": {**sampling, "skip_special_tokens": False}}
        answer = fresh.ask("/inference/v1/generate", body, headers={"X-Session-ID": "trace-1"})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert answer.json()["request_id"]
        tokens = [int(entry["token"].removeprefix("token_id:")) for entry in choice["logprobs"]["content"]]
        assert tokens == choice["token_ids"] == list(fresh.pool.log[-1][1].tokens)
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == list(fresh.pool.log[-1][1].log_probs)
        assert choice["finish_reason"] in ("stop", "length")
        return choice["token_ids"]

    first = generate([5, 6])
    second = generate([5, 6, *first, 8])
    generate([5, 7, *second])
    (session,) = fresh.sessions.values()
    assert check_law(fresh.pool.log, [session]) > 0
    _, other = session.branches()  # the first is that of the last answer
    assert len(other.tokens) == 3 + len(first) + len(second)
    assert session.id == "trace-1"


def test_a_session_shows_what_was_sampled_and_refuses_another_history(fresh):
    name, key = fresh.session()
    first = fresh.chat(key).json()["choices"][0]["message"]
    follow = [*HELLO, first, {"role": "tool", "content": "1"}]
    assert fresh.chat(key, follow).status_code == 200
    refused = fresh.chat(key, [*HELLO, {**first, "content": "mine"}, *follow[2:]])

    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "history_not_recorded")
    assert "'mine' was sent" in refused.json()["error"]["message"]
    shown = fresh.ask(f"/v1/sessions/{name}", key=key).json()
    assert shown["counts"] == {"answered": 2, "history_not_recorded": 1}
    turns = shown["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0]
    for turn, (_, response) in zip(turns, fresh.pool.log, strict=True):
        given, size = turn["token_ids"][: -len(response.tokens)], len(response.tokens)
        assert turn["token_ids"] == [*given, *response.tokens]
        assert turn["mask"] == [0] * len(given) + [1] * size
        assert turn["logprobs"] == [0.0] * len(given) + list(response.log_probs)
        assert turn["weight_versions"] == [None] * len(given) + list(response.versions)
    assert [token for turn in turns for token in turn["token_ids"]] == [
        *fresh.pool.log[1][0],
        *fresh.pool.log[1][1].tokens,
    ]


def test_without_a_session_nothing_is_recorded(one):
    assert one.chat(messages=[*HELLO, {"role": "assistant", "content": "never"}, *HELLO]).status_code == 200
    assert all(not session.turns for session in one.sessions.values())


def test_spaces_in_arguments_and_empty_fields_do_not_change_a_history(fresh):
    fresh.pool.said = ['<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>']
    _, key = fresh.session()
    first = fresh.chat(key, tools=TOOLS).json()["choices"][0]["message"]
    first["tool_calls"][0]["function"]["arguments"] = '{"b":2,"a":1}'
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"}
    again = [*HELLO, {**first, "annotations": [], "refusal": None}, result]
    assert fresh.chat(key, again, tools=TOOLS).status_code == 200
    assert fresh.chat(key, again).status_code == 409  # without the tools


def test_what_conversations_share_is_shown_once(fresh):
    name, key = fresh.session()
    first = fresh.chat(key, [{"role": "user", "content": "long " * 200}]).json()["choices"][0]["message"]
    for question in "abc":
        history = [{"role": "user", "content": "long " * 200}, first, {"role": "tool", "content": question}]
        assert fresh.chat(key, history).status_code == 200
    turns = fresh.ask(f"/v1/sessions/{name}", key=key).json()["turns"]
    (session,) = fresh.sessions.values()
    assert [turn["parent"] for turn in turns] == [None, 0, 0, 0]
    assert sum(len(turn["token_ids"]) for turn in turns) == session.size
    assert sum(len(branch.tokens) for branch in session.branches()) > 2 * session.size


def test_what_fails_again_is_not_repeated_by_the_openai_client(fresh):
    _, key = fresh.session()
    fresh.chat(key)
    history = [*HELLO, {"role": "assistant", "content": "mine"}, *HELLO]
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=fresh.url, api_key=key, http_client=http) as client:
        assert client.max_retries > 0
        with pytest.raises(openai.ConflictError, match="has not recorded"):
            client.chat.completions.create(model="toy", messages=history)
    assert fresh.counts["history_not_recorded"] == 1
    assert "x-should-retry" not in Refusal(503, "busy", "The server is busy.").headers


@pytest.mark.parametrize("stream", [False, True])
def test_examples_are_counted(fresh, stream):
    history = [*HELLO, {"role": "assistant", "content": "an example"}, *HELLO]
    answer = fresh.ask(
        "/v1/chat/completions",
        {"model": "toy", "messages": history, "n": 1 if stream else 2, "stream": stream},
        headers={"X-Session-ID": "a"},
    )
    assert '"session":{"id":"a","examples":1}' in answer.text.replace(" ", "")
    assert fresh.ask("/v1/sessions/a").json()["counts"]["examples"] == 1


def test_with_tool_choice_none_tools_are_shown_and_calls_stay_text(fresh):
    fresh.pool.said = ['<tool_call>{"name": "add", "arguments": {}}</tool_call>']
    choice = fresh.chat(tools=TOOLS, tool_choice="none").json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": fresh.pool.said[0]}
    assert '"name": "add"' in tokenizer("qwen").decode(list(fresh.pool.log[0][0]))


def test_an_empty_list_of_stop_strings_is_none():
    default = replace(SAMPLING, stop=("x",))
    for stop, found in ((None, ("x",)), ([], ()), ("y", ("y",))):
        assert sampling_of(ChatBody(model="toy", messages=HELLO, stop=stop), default, 100).stop == found


def test_offsets_of_texts():
    response = Response((1, 2, 3), (-1.0,) * 3, "stop", (0,) * 3)
    assert completion_log_probs(response, lambda ids: "ab" * ids[0])["text_offset"] == [0, 2, 6]
    assert completion_log_probs(Response((), (), "stop", ()), str)["text_offset"] == []


def test_a_header_of_a_session_acts_on_generation_alone(fresh):
    named = {"X-Session-ID": "mine"}
    begun = fresh.ask("/v1/sessions", {}, headers=named)
    assert begun.status_code == 201
    path = f"/v1/sessions/{begun.json()['id']}"
    assert fresh.ask(path, headers=named).status_code == 200
    assert fresh.ask("/v1/models", headers={"X-Session-ID": "a b"}).status_code == 200
    authorized = {"Authorization": f"Bearer {KEY}", **named}
    assert httpx.delete(fresh.url.removesuffix("/v1") + path, headers=authorized, trust_env=False).status_code == 200
    assert fresh.ask("/v1/chat/completions", {"model": 1}, headers=named).status_code == 400
    assert not fresh.sessions
    assert fresh.ask("/v1/chat/completions", {"model": "toy", "messages": HELLO}, headers=named).status_code == 200
    assert list(fresh.sessions) == ["mine"]


def test_fields_that_change_no_answer_are_read(one):
    fields = {"user": "a", "safety_identifier": "b", "prompt_cache_key": "c", "store": False, "service_tier": "auto"}
    assert one.chat(**fields).status_code == 200


def test_a_session_of_a_run_samples_as_the_run_does_in_slices_too(fresh):
    terms = Terms(seed=5, max_turns=2, sampling=replace(SAMPLING, min_new_tokens=20, temperature=0.7))
    session, key = fresh.endpoint.begin(terms)
    fresh.pool.script = [20] * 40
    streamed = fresh.chat(key, stream=True)
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert [(one.max_new_tokens, one.min_new_tokens, one.temperature) for one in fresh.pool.sampled] == [
        (16, 16, 0.7), (16, 4, 0.7), (16, 0, 0.7),
    ]  # fmt: skip
    for field in ({"temperature": 1.0}, {"top_p": 0.5}, {"top_k": 3}, {"seed": 1}):
        assert fresh.chat(key, **field).json()["error"]["code"] == "other_sampling"
    assert fresh.chat(key, temperature=0.7, max_tokens=30).status_code == 200
    assert fresh.chat(key).json()["error"]["code"] == "too_many_turns"
    assert len(session.turns) == 2


def test_rewards_of_sessions(fresh):
    name, key = fresh.session()
    assert fresh.ask("/v1/reward", {"reward": 1}).status_code == 400
    assert fresh.ask("/v1/reward", {"reward": "much"}, key).status_code == 400
    assert fresh.ask("/v1/reward", {"reward": 0.5, "metrics": {"calls": 2}}, key).status_code == 200
    assert fresh.ask(f"/v1/sessions/{name}", key=key).json()["reward"] == {"reward": 0.5, "metrics": {"calls": 2.0}}


def test_a_model_in_training_has_one_temperature_and_one_longest_answer():
    run = replace(SAMPLING, temperature=0.7, max_new_tokens=50)
    check_engine(replace(run, top_p=0.5), run)
    with pytest.raises(Refusal, match=r"temperature: .*at temperature 0\.7"):
        check_engine(SAMPLING, run)
    body = ChatBody(model="toy", messages=[], max_tokens=4096)
    assert sampling_of(body, run, 60, run.max_new_tokens).max_new_tokens == 50
    with pytest.raises(Refusal, match="no room"):
        sampling_of(body, run, 40, run.max_new_tokens)
