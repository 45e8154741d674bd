"""The real server with a model that follows a script, and one call of an agent as a run makes it."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import contextmanager
from pathlib import Path

from anytron.config.imports import _from_file
from anytron.serving.limits import Limits
from anytron.tasks import AgentTask
from anytron.workers.engines.rollout_engine import Response
from tests.core.serving.served import serving
from tests.core.serving.toys import END, SAMPLING, RandomPool, check_law, split_at_random, tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
AGENTS = EXAMPLES / "agents"


class Script(RandomPool):
    """Writes the texts of a script, one at each request, in random pieces of tokens; then nothing more."""

    def __init__(self, texts, split=split_at_random, end=END):
        super().__init__()
        self.texts, self.split, self.end = list(texts), split, end

    def answer(self, tokens, sampling, seed):
        text = self.texts.pop(0) if self.texts else ""
        ids = self.split(self.order, text)
        if not any(text.endswith(stop) for stop in sampling.stop):
            ids.append(self.end)
        response = Response(ids, [-self.order.randint(1, 1000) / 1024 for _ in ids], "stop", [self.version] * len(ids))
        self.log.append((tuple(tokens), response))
        return response


@contextmanager
def playing(texts):
    """Serve a model that writes these texts; the whole script must be asked for."""
    pool = Script(texts)
    with serving(pool, tokenizer("qwen"), SAMPLING, Limits(), 100_000) as server:
        yield server
    assert not pool.texts


def solved(server, solve, text, data=None, max_turns=8, **options):
    """Call an agent in a new session; return its result and what the session has recorded."""
    name, key = server.session()
    task = AgentTask(
        prompt_id="prompt-0", prompt_text=text, data=data or {}, seed=5, max_turns=max_turns,
        base_url=server.url, api_key=key, model="toy",
    )  # fmt: skip
    result = solve(task, **options)
    if inspect.isawaitable(result):
        result = asyncio.run(result)
    return result, server.sessions[name]


def check_one_conversation(server, session, turns):
    """Check that one conversation of so many turns was recorded, as it was sampled, and no request was refused."""
    assert session.counts == {"answered": turns}
    assert len(list(session.branches())) == 1
    check_law(server.pool.log, [session])


def agent(file, name="solve"):
    """Return a function of an example."""
    return getattr(_from_file(str(AGENTS / file), "environment.agent"), name)
