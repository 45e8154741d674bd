"""``anytron serve``: programs get what transformers computes by itself, and mistakes are found before a start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from contextlib import closing

import httpx
import openai
import pytest

from anytron.base.errors import ConfigError, WorkerError
from anytron.cli import serve
from anytron.cli.serve import run_serve
from anytron.serving import installation
from anytron.serving.keys import KEY_VARIABLE, read_key
from tests import listening
from tests.core.cli.conftest import COMMAND
from tests.core.cli.test_chat_command import answered, write_model
from tests.core.workers.executor.processes import offspring

KEY = "abcdefghijklmnopqrst"
OPTIONS = {"host": "127.0.0.1", "port": 0, "key_file": None, "name": None, "max_new_tokens": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "letters", 1)


def started(*arguments, **env):
    """Start the server; return the process, what it has said, and its address."""
    process = subprocess.Popen(
        [*COMMAND, "serve", *map(str, arguments), "--port", "0"], stderr=subprocess.PIPE, text=True,
        env=os.environ | {"ANYTRON_PLATFORM": "cpu"} | env, start_new_session=True,
    )  # fmt: skip
    said = ""
    while " at http" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return process, said, said.rpartition(" at ")[2].partition(";")[0]


def test_a_directory_is_served_until_ctrl_c(model):
    process, said, url = started(model, ANYTRON_SERVE_KEY=KEY)
    try:
        with openai.OpenAI(base_url=url, api_key=KEY, http_client=openai.DefaultHttpxClient(trust_env=False)) as client:
            found = client.chat.completions.create(
                model="letters", messages=[{"role": "user", "content": "hello"}], temperature=0, max_tokens=32
            )
            parts = [
                chunk.choices[0].text
                for chunk in client.completions.create(
                    model="letters", prompt="my cat", temperature=0, max_tokens=40, stream=True
                )
            ]
        processes = dict.fromkeys(offspring(process.pid), "child of the driver") | {process.pid: "driver"}
        seen = listening.described(processes)
    finally:
        os.killpg(process.pid, signal.SIGINT)
        rest = process.communicate(timeout=60)[1]

    assert found.choices[0].message.content == answered(model, "user:hello\na:", 32)
    assert "".join(parts) == answered(model, "my cat", 40)
    assert len(parts) == 3
    listening.check("anytron serve", seen)
    assert process.returncode == 130, rest
    assert "the server has ended; requests: 2 answered" in rest
    assert "Traceback" not in said + rest
    assert KEY not in said + rest


@pytest.mark.slow
def test_a_key_is_made_if_none_is_given(model):
    process, said, url = started(model, "--host", "0.0.0.0", "--name", "mine")
    try:
        key = said.partition("sets one): ")[2].split()[0]
        models = httpx.get(
            f"{url.replace('0.0.0.0', '127.0.0.1')}/models", headers={"Authorization": f"Bearer {key}"}, trust_env=False
        )
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)

    assert [one["id"] for one in models.json()["data"]] == ["mine"]
    assert "warning: other machines can reach this address" in said
    assert process.returncode == 143


def test_a_key_that_others_can_read_is_refused(tmp_path):
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    assert read_key(file) == KEY
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=f"its permissions are {mode:o}") as raised:
            read_key(file)
        assert KEY not in str(raised.value)


def test_the_key_file_of_another_user_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    other = os.geteuid() + 1
    monkeypatch.setattr("anytron.serving.keys.os.geteuid", lambda: other)
    with pytest.raises(ConfigError, match=f"this is the user {other}"):
        read_key(file)


def test_a_pipe_is_no_key_file_and_remedies_quote_the_path(tmp_path):
    pipe = tmp_path / "a pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(ConfigError, match="it is a directory, a pipe or a device") as raised:
        read_key(pipe)
    assert f"'{pipe}'" in raised.value.fix


def test_the_key_leaves_the_environment(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert serve._key(None) == (KEY, True)
    assert KEY_VARIABLE not in os.environ


@pytest.mark.slow
def test_a_server_whose_thread_fails_is_an_error(model, monkeypatch):
    async def failing(self, sockets):
        raise RuntimeError("the loop is broken")

    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    monkeypatch.setattr("anytron.serving.server.uvicorn.Server.serve", failing)
    with pytest.raises(WorkerError, match="the loop is broken"):
        run_serve(model, [], **OPTIONS)


@pytest.mark.parametrize("content", [b"short", b"two words that are long", b"\xc3\xa9" * 20, b"x" * 5000, b""])
def test_an_unusable_key_is_refused_and_not_shown(tmp_path, content):
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot be (used|read)") as raised:
        read_key(file)
    assert not content or content.decode() not in str(raised.value)


def test_mistakes_are_found_before_a_start(model, tmp_path, monkeypatch):
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as taken,
        pytest.raises(ConfigError, match="The server cannot listen at this address"),
    ):
        run_serve(model, [], **{**OPTIONS, "port": taken.getsockname()[1]})
    with pytest.raises(ConfigError, match="anytron serve does not use this key"):
        run_serve(model, ["algorithm.loss=x"], **OPTIONS)
    with pytest.raises(ConfigError, match="No usable model was found"):
        run_serve(tmp_path, [], **OPTIONS)
    with pytest.raises(ConfigError, match=r"cannot be read[\s\S]*umask 077"):
        run_serve(model, [], **{**OPTIONS, "key_file": tmp_path / "none"})
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'anytron\[serve\]'"):
        run_serve(model, [], **OPTIONS)


def test_importing_the_command_line_imports_no_server():
    code = "import sys, anytron.cli.main, anytron.cli.serve; print({'starlette', 'uvicorn'} & set(sys.modules))"
    done = subprocess.run([COMMAND[0], "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
