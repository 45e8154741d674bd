"""Agents for tests: the calculator of examples/ as a program that talks by HTTP, and agents that misbehave."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import httpx

from anytron.config.imports import resolve
from anytron.task.environments.protocol import ENVIRONMENT_PATH
from anytron.tasks import AgentResult, Turn

EXAMPLE = Path(__file__).parents[4] / "examples" / "calculator.py"


HTTP = httpx.Client(timeout=60, trust_env=False)


class Client:
    """Asks the model, and keeps the conversation."""

    def __init__(self, task):
        self.task, self.messages = task, [{"role": "user", "content": task.prompt_text}]

    def post(self, path, body):
        headers = {"Authorization": f"Bearer {self.task.api_key}"}
        found = HTTP.post(f"{self.task.base_url}{path}", json=body, headers=headers)
        if found.is_error:
            raise RuntimeError(found.json()["error"]["code"])
        return found.json()

    def ask(self, **fields):
        body = {"model": self.task.model, "messages": self.messages, **fields}
        choice = self.post("/chat/completions", body)["choices"][0]
        self.messages.append(choice["message"])
        return choice["message"]["content"] + (choice["stop_reason"] or "")

    def show(self, text):
        self.messages.append({"role": "tool", "content": text})


def solve(task):
    """Do what the class Calculator does, from the other side."""
    client, judge = Client(task), resolve(f"{EXAMPLE}:Calculator", ENVIRONMENT_PATH)()
    judge.reset(task)
    reward, metrics = 0.0, {}
    while True:
        told = judge.step(Turn(client.ask(), (), finished=True))
        reward += told.reward
        for name, number in told.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + number
        if told.done:
            return AgentResult(reward, metrics)
        client.show(told.text)


async def asynchronous(task):
    return len(Client(task).ask())


def by_post(task):
    client = Client(task)
    client.ask()
    client.post("/reward", {"reward": 0.25, "metrics": {"sent": 2}})


def edits(client):
    client.messages[-1]["content"] += "9"
    client.show("1;")
    client.ask()


def again(client, **fields):
    client.messages.pop()
    client.ask(**fields)


def other_key(client):
    client.task.__dict__["api_key"] = "another-key-of-nobody"
    client.ask()


def raises(client):
    raise LookupError("no opinion")


MISBEHAVIOUR = {
    "raises": raises,
    "exits": lambda client: sys.exit(3),
    "dies": lambda client: os._exit(4),
    "hangs": lambda client: time.sleep(600),
    "no reward": lambda client: None,
    "text": lambda client: "good",
    "nan": lambda client: float("nan"),
    "edits": edits,
    "colder": lambda client: again(client, temperature=0.5),
    "seeds": lambda client: again(client, seed=1),
    "other key": other_key,
}


def choosy(task, fault):
    """Misbehave for the prompt 9012 only, after a turn of the model."""
    client = Client(task)
    client.ask()
    if task.prompt_text != "9012>":
        return 1.0
    return MISBEHAVIOUR[fault](client)


def branching(task):
    """Ask; let a sub-agent ask something else; then ask for two answers at once, and for another one at their place."""
    client, helper = Client(task), Client(task)
    client.ask()
    helper.messages[0] = {"role": "user", "content": "31>"}
    helper.ask()
    client.show("1;")
    client.ask(n=2)
    again(client)
    return 0.5


def tells(task, file):
    """Write down where the model is, and with which key it answers."""
    Client(task).ask()
    Path(file).write_text(json.dumps([task.base_url, task.api_key]))
    return 1.0


def through_the_environment(task, exceptions):
    """Ask as a client does that reads the environment's proxies; the user's own exceptions stay."""
    known = os.environ.get("no_proxy", exceptions).split(",")
    assert set((exceptions or "").split(",")) - {""} <= set(known) <= {*(exceptions or "").split(","), "127.0.0.1"}
    headers = {"Authorization": f"Bearer {task.api_key}"}
    body = {"model": task.model, "messages": [{"role": "user", "content": task.prompt_text}]}
    httpx.post(f"{task.base_url}/chat/completions", json=body, headers=headers, timeout=20).raise_for_status()
    return 1.0


def silent(task):
    return 1.0


def talkative(task):
    client = Client(task)
    while True:
        client.ask()
        client.show("1;")


def flaky(task, directory):
    """Fail the first time for each prompt."""
    Client(task).ask()
    tried = Path(directory) / task.prompt_id
    if not tried.exists():
        tried.touch()
        raise LookupError("not yet")
    return 1.0


def main():
    """The program of ``environment.command``."""
    task = json.loads(Path(os.environ["ANYTRON_TASK_FILE"]).read_text())
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": os.environ["ANYTRON_MODEL"], "messages": [{"role": "user", "content": task["prompt_text"]}]}
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
        text = client.post("/chat/completions", json=body).raise_for_status().json()["choices"][0]["message"]["content"]
        reward = float(text == task["prompt_text"].rstrip(">")) * len(task["data"]["answer"])
        client.post("/reward", json={"reward": reward}).raise_for_status()
    sys.exit(5 if task["prompt_id"] == "9012" else 0)


if __name__ == "__main__":
    main()
