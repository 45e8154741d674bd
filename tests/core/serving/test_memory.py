"""What clients hold is bounded: the counts are above what Python needs, and each limit refuses by name."""

from __future__ import annotations

import gc
import json
import threading
import tracemalloc
from dataclasses import replace

import httpx
import pytest
import torch

from anytron.base.packed import Packed
from anytron.config.json_files import parse_object
from anytron.serving import sessions
from anytron.serving.conversation import Conversation
from anytron.serving.memory import LETTER, ClientMemory, Hold, bytes_of_objects
from anytron.serving.refusal import Refusal
from anytron.serving.sessions import Session, Terms
from anytron.task.data.images import ImagePatches
from anytron.workers.engines.rollout_engine import Response
from tests.core.serving.served import HELLO, LIMITS, served, wait_until
from tests.core.serving.toys import SAMPLING

KIB = 1 << 10
BODIES = {
    "text": json.dumps({"messages": ["hello, [world] {of: letters}" * 2000]}),
    "emoji": json.dumps({"messages": ["\U0001f600" + "a" * 60_000]}, ensure_ascii=False),
    "lists": '{"messages": [' + ",".join(["[]"] * 30_000) + "]}",
    "objects": '{"messages": [' + ",".join(["{}"] * 30_000) + "]}",
    "entries": '{"messages": [' + ",".join(['{"a":1.5}'] * 10_000) + "]}",
    "names": '{"messages": {' + ",".join(f'"{number}":{number}' for number in range(20_000)) + "}}",
    "numbers": '{"messages": [' + ",".join(map(str, range(1000, 30_000))) + "]}",
}


def bytes_taken(make):
    """The result of a function, and the bytes that it holds."""
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        gc.collect()
        return made, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", BODIES)
def test_the_objects_of_a_body_take_no_more_than_is_counted(name):
    body = BODIES[name].encode()
    _, taken = bytes_taken(lambda: parse_object(body))
    counted = LETTER * len(body) + bytes_of_objects(body)
    assert taken + len(body) < counted
    if name in ("lists", "objects"):  # the twin: letters alone would not cover them
        assert taken > LETTER * len(body)


def recorded(turns, answered, words):
    """A session of many conversations and of many turns."""
    session = Session("a")
    before = None
    for number in range(turns):
        response = Response(range(answered), [-0.5] * answered, "stop", range(answered))
        if number % 2:
            session.record(None, [number], response)
            continue
        conversation = Conversation([{"role": "user", "content": str(number)}])
        message = {"role": "assistant", "content": "".join([words] * answered)}
        before = session.record(before if number % 8 else None, range(3), response, conversation, message)
    return session


@pytest.mark.parametrize(
    ("turns", "answered", "words"), [(2000, 1, "a"), (300, 200, "word "), (200, 100, "\U0001f600")]
)
def test_a_session_takes_no_more_than_is_counted(monkeypatch, turns, answered, words):
    session, taken = bytes_taken(lambda: recorded(turns, answered, words))
    assert taken < session.recorded < 20 * taken
    monkeypatch.setattr(sessions, "TURN", 0)  # the twin
    monkeypatch.setattr(sessions, "NUMBERS", 0)
    assert recorded(turns, answered, "").recorded < taken


def test_images_are_counted():
    session = Session("a")
    patches = ImagePatches(torch.zeros(16, 1176), torch.tensor([[1, 4, 4]]))
    session.record(None, Packed("i", [1]), Response([1], [0.0], "stop", [0]), images=patches)
    assert session.recorded > 16 * 1176 * 4


FLOOD = replace(LIMITS, session_bytes=300 * KIB, memory_bytes=900 * KIB, connections=200, requests=64)


def flooded(server, key):
    """Begin conversations until the session is full; return how many were answered, and the last answer."""
    for answered in range(100):
        body = {"model": "toy", "token_ids": [5, answered % 200], "sampling_params": {"max_tokens": 1}}
        answer = server.ask("/inference/v1/generate", body, key)
        if answer.is_error:
            return answered, answer
    return 100, answer


@pytest.mark.parametrize("sabotaged", [False, True])
def test_the_client_of_a_session_cannot_fill_the_server(monkeypatch, sabotaged):
    if sabotaged:
        monkeypatch.setattr(ClientMemory, "check", lambda *arguments: None)
    with served(limits=FLOOD) as server:
        (name, key), (_, other) = server.session(), server.session()
        answered, last = flooded(server, key)
        session = server.sessions[name]
        if sabotaged:
            assert (answered, last.status_code) == (100, 200)
            assert session.recorded > 300 * KIB
            return
        assert (last.status_code, last.json()["error"]["code"]) == (403, "session_full")
        assert "rollout.endpoint_limits.session_mib" in last.json()["error"]["message"]
        assert last.headers["x-should-retry"] == "false"
        assert 20 < answered < 100
        assert session.recorded <= 300 * KIB
        assert session.counts["session_full"] == server.counts["session_full"] == 1
        assert server.chat(other).status_code == 200  # others go on
        headers = {"Authorization": f"Bearer {key}"}
        httpx.delete(f"{server.url}/sessions/{name}", headers=headers, trust_env=False)
        assert server.chat(server.session()[1]).status_code == 200


def test_all_sessions_together_cannot_fill_the_server():
    with served(limits=FLOOD) as server:
        for _, key in [server.session() for _ in range(6)]:
            _, last = flooded(server, key)
            if last.json()["error"]["code"] == "server_full":
                break
        assert last.status_code == 429
        assert "rollout.endpoint_limits.memory_mib" in last.json()["error"]["message"]
        assert sum(session.recorded for session in server.sessions.values()) <= 900 * KIB
        assert server.chat().json()["error"]["code"] == "server_full"
        terms = Terms(1, 8, SAMPLING)
        agents, key = server.endpoint.begin(terms)  # an agent of a run is not held up
        assert server.chat(key).status_code == 200
        server.endpoint.end(agents)


def test_requests_of_a_session_that_wait_cannot_fill_the_server():
    with served(limits=FLOOD) as server:
        (_, key), (_, other) = server.session(), server.session()
        server.pool.held = True
        codes = []

        def ask():
            answer = server.chat(key, [{"role": "user", "content": "long " * 300}])
            codes.append(answer.status_code if answer.status_code == 200 else answer.json()["error"]["code"])

        threads = [threading.Thread(target=ask) for _ in range(20)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(codes) + len(server.pool.waiting) == 20)
        assert set(codes) == {"session_busy"}
        waiting = len(server.pool.waiting)
        assert 1 <= waiting < 15
        server.pool.held = False
        assert server.chat(other).status_code == 200
        for thread in threads:
            thread.join()
        assert codes.count(200) == waiting
        memory = server.endpoint._routes._memory
        wait_until(lambda: memory.held == 0)
        assert not any(session.in_progress for session in server.sessions.values())


def test_a_request_is_counted_for_the_session_that_it_names():
    memory = ClientMemory(FLOOD, lambda: 0)
    session, hold = Session("a"), Hold(memory, None)
    hold.add(1000)
    assert (memory.held, session.in_progress) == (1000, 0)
    hold.move(session)
    assert (memory.held, session.in_progress) == (1000, 1000)
    with pytest.raises(Refusal) as refused:
        hold.add(300 * KIB - 500)
    assert refused.value.code == "session_full"
    session.in_progress += 200 * KIB  # another request
    with pytest.raises(Refusal) as refused:
        hold.add(200 * KIB)
    assert refused.value.code == "session_busy"
    session.in_progress -= 200 * KIB
    hold.close()
    assert (memory.held, session.in_progress) == (0, 0)


def test_a_session_that_is_shown_counts_what_is_written():
    with served(limits=replace(FLOOD, session_bytes=9000 * KIB, memory_bytes=800 * KIB)) as server:
        name, key = server.session()
        body = {"model": "toy", "token_ids": [5] * 1500, "sampling_params": {"max_tokens": 1}}
        assert server.ask("/inference/v1/generate", body, key).status_code == 200
        assert server.ask(f"/v1/sessions/{name}", key=key).json()["error"]["code"] == "server_full"
        assert server.chat(messages=HELLO).status_code == 200
