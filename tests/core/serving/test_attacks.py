"""What attackers do not get, what is refused, and what a fault costs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import replace

import httpx
import pytest
from starlette.applications import Starlette

from anytron.base.errors import ConfigError
from anytron.serving.desk import Desk
from anytron.serving.server import Server, bind, is_loopback
from anytron.workers.engines.rollout_engine import Response
from tests.core.serving.served import HELLO, KEY, LIMITS, posted, served, wait_until
from tests.core.serving.toys import SAMPLING, tokenizer

PATHS = [
    "/v1/models", "/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/v1/sessions", "/v1/sessions/a",
    "/v1/embeddings", "/",
]  # fmt: skip


@pytest.mark.parametrize("key", ["", "wrong", "a-key-of-the-serve", KEY + "x", "\u00e9" * 20])
def test_without_the_key_nothing_is_answered(one, key):
    asked = [(method, path) for path in PATHS for method in ("GET", "POST", "DELETE", "PUT")]
    for method, path in asked:
        headers = {"Authorization": f"Bearer {key}".encode()} if key else {"Authorization": "Basic eA=="}
        answer = httpx.request(method, one.url.removesuffix("/v1") + path, headers=headers, trust_env=False)
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


def test_connections_that_send_nothing_keep_nobody_out():
    """They are closed because they are too many: the time for their headers never ends in this test."""
    limits = replace(LIMITS, headers_s=3600.0, connections=50)
    with served(limits=limits) as server, ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(server.address)) for _ in range(200)]
        assert server.chat().status_code == 200
        assert sum(map(is_closed, silent)) >= 200 - limits.connections


def test_too_many_requests_and_sessions_are_refused(fresh):
    fresh.pool.held = True
    waiting = [threading.Thread(target=fresh.chat) for _ in range(4)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: len(fresh.pool.waiting) == 4)
    busy = fresh.chat()
    assert (busy.status_code, busy.json()["error"]["code"]) == (503, "busy")
    assert fresh.ask("/v1/sessions/a").status_code == 503
    fresh.pool.held = False
    for thread in waiting:
        thread.join()
    for _ in range(6):
        fresh.session()
    assert fresh.ask("/v1/sessions", {}).status_code == 429


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
    wait_until(lambda: fresh.counts["aborted"] == 1)
    fresh.pool.held = False
    assert fresh.chat().status_code == 200


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"model": "other"}, 404, "this server has the model toy"),
        ({"messages": []}, 400, "There is nothing to answer"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "x"}]},
            400,
            "the last message must not be the assistant's",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, 400, "text and image_url"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "surrogate"),
        ({"messages": [{"role": "user", "content": "x", "\ud800": "y"}]}, 400, "surrogate"),
        ({"messages": [{"role": "user", "content": "x", "a" * 5000: "y"}]}, 400, "does not read aaa"),
        ({"\ud800": 1}, 400, "unable to parse raw data as a unicode string"),
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
    assert len(answer.text) < 1000


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[" * 5000, b"\xff", b'{"model": NaN}'])
def test_a_body_that_is_no_request_is_refused(one, body):
    assert posted(one, body).status_code == 400


def test_unknown_tokens_and_routes_are_refused(one):
    for ids in ([10**6], [-1], []):
        assert one.ask("/inference/v1/generate", {"model": "toy", "token_ids": ids}).status_code == 400
    assert one.ask("/v1/embeddings", {}).json()["error"]["code"] == "no_such_route"
    assert one.ask("/v1/completions", {"model": "toy", "prompt": "x"}, headers={"X-Session-ID": "a"}).status_code == 400
    named = {"X-Session-ID": "a b"}
    assert one.ask("/v1/completions", {"model": "toy", "prompt": [1]}, headers=named).status_code == 400


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


def test_nobody_else_gets_the_address():
    with closing(bind("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(ConfigError, match=r"cannot listen at this address[\s\S]*another port"):
            bind("127.0.0.1", port)
        with closing(socket.create_connection(("127.0.0.1", port))):
            pass  # it waits for the server


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_that_the_machine_does_not_have_has_its_remedy(host):
    with pytest.raises(ConfigError, match=r"name an address of this machine, for example --host 127\.0\.0\.1"):
        bind(host, 0)


def test_an_answer_to_a_closed_loop_is_dropped():
    loop, desk = asyncio.new_event_loop(), Desk()
    waiting = loop.create_task(desk.answer((1,), SAMPLING, 0))
    loop.run_until_complete(asyncio.sleep(0))
    loop.stop()
    loop.close()
    desk.close()
    waiting._log_destroy_pending = False


def test_a_server_that_was_never_started_can_be_stopped():
    with closing(bind("127.0.0.1", 0)) as bound:
        Server(Starlette(), bound, LIMITS).stop()


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
        os.kill(server.endpoint._renderer._reader._child.pid, signal.SIGKILL)
        died = server.chat()
        assert died.status_code == 503
        assert "x-should-retry" not in died.headers
        assert "/" not in died.text
        assert server.chat().status_code == 200


def test_an_error_of_a_template_has_no_path_of_the_server(monkeypatch):
    refusing = "{% if messages[0].content == 'x' %}{{ raise_exception('no x') }}{% endif %}a"
    monkeypatch.setattr(tokenizer("qwen"), "chat_template", refusing)
    with served() as server:
        refused = server.chat(messages=[{"role": "user", "content": "x"}])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_tokenised")
    message = refused.json()["error"]["message"]
    assert "no x" in message
    assert "where:" not in message


def test_a_bug_is_not_shown_to_clients(fresh, monkeypatch, caplog):
    monkeypatch.setattr("anytron.serving.app.answers.usage", lambda *_: 1 / 0)
    answer = fresh.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "division" not in answer.text
    wait_until(lambda: "ZeroDivisionError" in caplog.text)
    assert fresh.ask("/v1/models").status_code == 200
