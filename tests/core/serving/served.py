"""A server in this process, with a toy model behind it."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import httpx
import openai

from anytron.serving.endpoint import Endpoint
from anytron.serving.limits import Limits
from anytron.serving.server import bind
from anytron.serving.service import ServedModel
from tests.core.serving.toys import END, SAMPLING, RandomPool, tokenizer

KEY = "a-key-of-the-server"
HELLO = [{"role": "user", "content": "hi"}]
LIMITS = Limits(body_bytes=10_000, body_s=0.5, headers_s=1.0, connections=60, requests=4, sessions=6)


class Served:
    """A server in this process."""

    def __init__(self, pool, endpoint, bound):
        self.pool, self.endpoint, self.counts = pool, endpoint, endpoint.counts
        self.url, self.address = endpoint.url, bound.getsockname()

    @property
    def sessions(self):
        return self.endpoint._keys._sessions

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
    with serving(RandomPool(seed, template, **options), tokenizer(template), SAMPLING, limits) as server:
        yield server


@contextmanager
def serving(pool, one, sampling, limits=LIMITS, context=2000, vision=None):
    bound, over = bind("127.0.0.1", 0), threading.Event()
    model = ServedModel("toy", one, len(one), context, sampling, vision=vision)
    with Endpoint(model, {}, KEY, bound, limits) as endpoint:

        def work():
            while not over.is_set():
                endpoint.desk.work(pool, 0.005)

        worker = threading.Thread(target=work)
        endpoint.start()
        worker.start()
        try:
            yield Served(pool, endpoint, bound)
        finally:
            over.set()
            worker.join()


def wait_until(true):
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def text_of(tokens):
    return tokenizer("qwen").decode([token for token in tokens if token != END])


def posted(server, body):
    """Post bytes as a chat request."""
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(f"{server.url}/chat/completions", content=body, headers=headers, trust_env=False)
