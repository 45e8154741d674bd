"""The server over a real socket: what clients get, and what attackers do not get."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from contextlib import closing, contextmanager

import httpx
import openai
import pytest

from anytron.serving.app import Routes
from anytron.serving.desk import Desk
from anytron.serving.keys import Keyring
from anytron.serving.limits import Limits
from anytron.serving.rendering import Renderer
from anytron.serving.server import Server, bind, is_loopback, url_of
from anytron.serving.service import ServedModel, Service
from anytron.workers.engines.rollout_engine import Response
from tests.core.serving.toys import END, SAMPLING, TOOLS, RandomPool, check_law, tokenizer

KEY = "a-key-of-the-server"
HELLO = [{"role": "user", "content": "hi"}]
LIMITS = Limits(body_bytes=10_000, body_s=0.5, headers_s=1.0, connections=60, requests=4, sessions=6, tokens=5_000)


class Served:
    """A server in this process."""

    def __init__(self, pool, routes, keys, bound, renderer):
        self.pool, self.routes, self.keys, self.renderer = pool, routes, keys, renderer
        self.url, self.address = url_of(bound), bound.getsockname()

    def ask(self, path, body=None, key=KEY, **named):
        headers = {"Authorization": f"Bearer {key}", **named.pop("headers", {})}
        method = "GET" if body is None else "POST"
        url = self.url.removesuffix("/v1") + path
        return httpx.request(method, url, json=body, headers=headers, timeout=20, trust_env=False, **named)

    def chat(self, key=KEY, messages=HELLO, **fields):
        return self.ask("/v1/chat/completions", {"model": "toy", "messages": messages, **fields}, key)

    def client(self, key=KEY):
        return openai.OpenAI(
            base_url=self.url, api_key=key, max_retries=0, http_client=openai.DefaultHttpxClient(trust_env=False)
        )

    def session(self):
        begun = self.ask("/v1/sessions", {})
        assert begun.status_code == 201
        return begun.json()["id"], begun.json()["key"]


@contextmanager
def served(template="qwen", seed=0, limits=LIMITS, **options):
    pool, desk = RandomPool(seed, template, **options), Desk()
    one = tokenizer(template)
    renderer = Renderer(one, len(one), {})
    keys = Keyring(KEY, limits)
    routes = Routes(Service(ServedModel("toy", one, len(one), 2000, SAMPLING), renderer, desk, limits), keys)
    bound = bind("127.0.0.1", 0)
    server, over = Server(routes.app(), bound, limits), threading.Event()

    def work():
        while not over.is_set():
            desk.work(pool, 0.005)

    worker = threading.Thread(target=work)
    server.start()
    worker.start()
    try:
        yield Served(pool, routes, keys, bound, renderer)
    finally:
        over.set()
        worker.join()
        desk.close()
        server.stop()
        renderer.close()


@pytest.fixture(scope="module")
def one():
    with served() as server:
        yield server


@pytest.fixture
def fresh():
    with served(seed=3) as server:
        yield server


def wait_until(true):
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def text_of(tokens):
    return tokenizer("qwen").decode([token for token in tokens if token != END])


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
    (branch,) = fresh.ask(f"/v1/sessions/{name}").json()["branches"]
    sampled = [token for token, own in zip(branch["token_ids"], branch["mask"], strict=True) if own]
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
    (session,) = fresh.keys.sessions()
    assert check_law(fresh.pool.log, [session]) > 0
    assert len(next(session.branches()).tokens) == 3 + len(first) + len(second)
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
    (branch,) = shown["branches"]
    assert sum(branch["mask"]) == sum(len(response.tokens) for _, response in fresh.pool.log)
    assert {len(branch[field]) for field in ("mask", "logprobs", "weight_versions")} == {len(branch["token_ids"])}


def test_without_a_session_nothing_is_recorded(one):
    assert one.chat(messages=[*HELLO, {"role": "assistant", "content": "never"}, *HELLO]).status_code == 200
    assert all(not session.turns for session in one.keys.sessions())


@pytest.mark.parametrize("key", ["", "wrong", "a-key-of-the-serve", KEY + "x", "\u00e9" * 20])
def test_without_the_key_nothing_is_answered(one, key):
    for path, body in [
        ("/v1/models", None),
        ("/v1/chat/completions", {}),
        ("/v1/sessions", {}),
        ("/inference/v1/generate", {}),
    ]:
        headers = {"Authorization": f"Bearer {key}".encode()} if key else {"Authorization": "Basic eA=="}
        answer = one.ask(path, body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert KEY not in answer.text
        assert "access-control-allow-origin" not in answer.headers


def test_a_key_of_a_session_sees_no_other_session(fresh):
    (mine, key), (other, _) = fresh.session(), fresh.session()

    assert fresh.ask(f"/v1/sessions/{mine}", key=key).status_code == 200
    assert fresh.ask(f"/v1/sessions/{other}", key=key).status_code == 404
    assert fresh.ask(f"/v1/sessions/{other}", key=key, headers={"X-Session-ID": other}).status_code == 404
    assert fresh.ask("/v1/sessions", {}, key).status_code == 403
    assert (
        httpx.delete(
            f"{fresh.url}/sessions/{other}", headers={"Authorization": f"Bearer {key}"}, trust_env=False
        ).status_code
        == 404
    )
    first = fresh.chat(key).json()["choices"][0]["message"]
    _, third = fresh.session()
    fresh.chat(third, [{"role": "user", "content": "another"}])
    assert fresh.chat(third, [*HELLO, first, *HELLO]).status_code == 409
    gone = httpx.delete(f"{fresh.url}/sessions/{mine}", headers={"Authorization": f"Bearer {key}"}, trust_env=False)
    assert gone.status_code == 200
    assert fresh.chat(key).status_code == 401


def test_a_body_that_is_too_large_is_refused(one):
    assert one.chat(messages=[{"role": "user", "content": "x" * 20_000}]).status_code == 413


def raw(server, text, wait=5.0):
    """Send bytes, and read until the server closes the connection."""
    with closing(socket.create_connection(server.address)) as connection:
        connection.settimeout(wait)
        connection.sendall(text)
        found = b""
        while part := connection.recv(1 << 16):
            found += part
        return found


def test_slow_headers_and_slow_bodies_end(one):
    begun = time.monotonic()
    assert raw(one, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n") == b""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n{{"
    )
    assert b" 408 " in raw(one, head.encode()).partition(b"\r\n")[0]
    assert b" 401 " in raw(one, head.replace(KEY, "wrong").encode()).partition(b"\r\n")[0]
    assert time.monotonic() - begun < 8


def is_closed(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_thousand_connections_keep_nobody_out(fresh):
    with_nothing = []
    try:
        with_nothing.extend(socket.create_connection(fresh.address) for _ in range(1000))
        assert fresh.chat().status_code == 200
        assert sum(is_closed(connection) for connection in with_nothing) >= 1000 - LIMITS.connections
    finally:
        for connection in with_nothing:
            connection.close()


def test_too_many_requests_sessions_and_tokens_are_refused(fresh):
    fresh.pool.held = True
    waiting = [threading.Thread(target=fresh.chat) for _ in range(4)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: len(fresh.pool.waiting) == 4)
    busy = fresh.chat()
    assert (busy.status_code, busy.json()["error"]["code"]) == (503, "busy")
    fresh.pool.held = False
    for thread in waiting:
        thread.join()
    keys = [fresh.session()[1] for _ in range(6)]
    assert fresh.ask("/v1/sessions", {}).status_code == 429
    for _ in range(5):
        body = {"model": "toy", "token_ids": [5] * 1500, "sampling_params": {}}
        last = fresh.ask("/inference/v1/generate", body, keys[0]).status_code
    assert last == 429


@pytest.mark.parametrize("stream", [False, True])
def test_the_request_of_a_client_that_leaves_is_given_up(fresh, stream):
    fresh.pool.held = True
    body = json.dumps({"model": "toy", "messages": HELLO, "stream": stream})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with closing(socket.create_connection(fresh.address)) as connection:
        connection.sendall((head + body).encode())
        wait_until(lambda: fresh.pool.waiting)
    wait_until(lambda: fresh.pool.cancelled == [0])
    wait_until(lambda: fresh.routes.counts["aborted"] == 1)
    fresh.pool.held = False
    assert fresh.chat().status_code == 200


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"model": "other"}, 404, "this server has the model toy"),
        ({"messages": []}, 400, "There is nothing to answer"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "x"}]}, 400, "the last message must be the user's"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "list of parts of the type text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "surrogate"),
        ({"messages": [{"role": "user", "content": "x", "audio": {"id": 1}}]}, 400, "does not read audio"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": 1e-9}, 400, "must be 0"),
        ({"logit_bias": {"1": 1}}, 400, "logit_bias"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"guided_json": {}}, 400, "guided_json: the server does not know this field"),
        ({"max_tokens": 5000}, 400, "tokens of the model's context are left"),
        ({"messages": [{"role": "user", "content": "Q" * 2100}]}, 400, "There is no room for an answer"),
        ({"n": 17}, 400, "at most 16"),
        ({"n": 2, "stream": True}, 400, "a stream has one answer"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, 400, "chat_template is set by the server"),
        ({"messages": [{"role": "user", "content": "x"}] * 2, "stop": [""]}, 400, "stop"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(one, fields, status, says):
    answer = posted(one, json.dumps({"model": "toy", "messages": HELLO, **fields}).encode())
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]["message"]


def posted(server, body):
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(f"{server.url}/chat/completions", content=body, headers=headers, trust_env=False)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[" * 5000, b"\xff", b'{"model": NaN}'])
def test_a_body_that_is_no_request_is_refused(one, body):
    assert posted(one, body).status_code == 400


def test_unknown_tokens_and_routes_are_refused(one):
    for ids in ([10**6], [-1], []):
        assert one.ask("/inference/v1/generate", {"model": "toy", "token_ids": ids}).status_code == 400
    assert one.ask("/v1/embeddings", {}).json()["error"]["code"] == "no_such_route"
    assert one.ask("/v1/completions", {"model": "toy", "prompt": "x"}, headers={"X-Session-ID": "a"}).status_code == 400
    assert one.ask("/v1/models", headers={"X-Session-ID": "a b"}).status_code == 400


def test_requests_end_with_the_server():
    with served() as server:
        server.pool.held = True
        answers = []
        thread = threading.Thread(target=lambda: answers.append(server.chat()))
        thread.start()
        wait_until(lambda: server.pool.waiting)
    thread.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "server_ends")


def test_the_default_address_is_loopback():
    with closing(bind("127.0.0.1", 0)) as bound:
        assert is_loopback(bound)
    with closing(bind("0.0.0.0", 0)) as bound:
        assert not is_loopback(bound)


def test_a_template_that_never_ends_costs_its_request(monkeypatch):
    monkeypatch.setattr("anytron.serving.rendering.TEMPLATE_SECONDS", 0.3)
    loop = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    endless = "{% if messages[0].content == 'x' %}" + loop + "{% endif %}a"
    monkeypatch.setattr(tokenizer("qwen"), "chat_template", endless)
    with served() as server:
        refused = server.chat(messages=[{"role": "user", "content": "x"}])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_tokenised")
        assert "did not end within 0.3 seconds" in refused.json()["error"]["message"]
        assert server.chat().status_code == 200


def test_outputs_that_are_not_finite_are_no_answer(fresh, monkeypatch):
    monkeypatch.setattr(fresh.pool, "answer", lambda *_: Response((5,), (float("nan"),), "stop", (0,)))
    answer = fresh.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "not_finite")


def test_a_tokenising_process_that_dies_costs_a_request():
    with served() as server:
        assert server.chat().status_code == 200
        os.kill(server.renderer._reader._child.pid, signal.SIGKILL)
        assert server.chat().status_code == 400
        assert server.chat().status_code == 200


def test_a_bug_is_not_shown_to_clients(fresh, monkeypatch, caplog):
    monkeypatch.setattr("anytron.serving.app.answers.usage", lambda *_: 1 / 0)
    answer = fresh.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "division" not in answer.text
    wait_until(lambda: "ZeroDivisionError" in caplog.text)
    assert fresh.ask("/v1/models").status_code == 200


def test_spaces_in_arguments_and_empty_fields_do_not_change_a_history(fresh):
    fresh.pool.said = ['<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>']
    _, key = fresh.session()
    first = fresh.chat(key, tools=TOOLS).json()["choices"][0]["message"]
    first["tool_calls"][0]["function"]["arguments"] = '{"b":2,"a":1}'
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"}
    again = [*HELLO, {**first, "annotations": [], "refusal": None}, result]
    assert fresh.chat(key, again, tools=TOOLS).status_code == 200
    assert fresh.chat(key, again).status_code == 409  # without the tools
