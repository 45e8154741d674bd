"""``anytron chat``: answers are those that transformers computes by itself, and mistakes are found before a start."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from anytron.base.errors import AnytronError
from anytron.cli.chat import _batches, run_chat
from anytron.cli.chat_model import find_beginning, find_model
from anytron.config.load import load_config
from anytron.record.checkpoint.directory import Best, CheckpointDirectory
from anytron.record.checkpoint.manifest import DriverState, FileRecord, SourceState
from anytron.workers.executor.local import LocalExecutor
from tests.core.cli.conftest import COMMAND, EXAMPLE, ROOT, anytron
from tests.core.cli.test_terminal import obeyed

LETTERS = "abcdefghijklmnopqrstuvwxyz:\n "
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 31, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 29, "pad_token_id": 30, "initializer_range": 0.5,
}  # fmt: skip
TEMPLATE = (
    "{% for one in messages %}{{ one.role }}:{{ one.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{{ shout }}{% endif %}"
)
RUN = """
model: {path: start, tokenizer: hf}
data: {source: jsonl, options: {path: gone, chat: true, system: be kind}, chat_template_kwargs: {shout: hey}}
rewards: [{function: exact_match}]
rollout: {engine: megatron, max_new_tokens: 5, stop: [STOP]}
"""


def write_model(directory, seed, prefix="", template=TEMPLATE):
    """Write a random model of one token per character."""
    vocabulary = {prefix + letter: number for number, letter in enumerate(LETTERS)} | {"<eos>": 29, "<pad>": 30}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<pad>")
    fast.chat_template = template
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN3)).save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


def answered(directory, prompt, new_tokens):
    """Let transformers answer, without sampling."""
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    given = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    found = model.generate(given, max_new_tokens=new_tokens, do_sample=False, eos_token_id=29, pad_token_id=30)
    return tokenizer.decode(found[0, given.shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's directory with the model that it began with and the one that it has trained."""
    path = tmp_path_factory.mktemp("run")
    write_model(path / "start", 2)
    weights = write_model(path / "hf", 1) / "model.safetensors"
    # As published models have them: a module for speculative decoding.
    save_file(load_file(weights) | {"mtp.norm.weight": torch.ones(8)}, weights, {"format": "pt"})
    stop = answered(path / "hf", "system:be kind\nuser:hello\na:hey", 5)[1]
    (path / "config.yaml").write_text(RUN.replace("STOP", json.dumps(stop)))
    return path


@pytest.fixture
def copy(run, tmp_path):
    """The same in a directory that a test may change."""
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def ask(path, *options, prompts="hello\n", **env):
    return subprocess.run(
        [*COMMAND, "chat", str(path), *options], input=prompts, capture_output=True, text=True,
        env=os.environ | {"ANYTRON_PLATFORM": "cpu"} | env, timeout=240, check=False,
    )  # fmt: skip


def test_a_directory_answers_each_line_by_itself(run):
    done = ask(run / "hf", "--json", prompts="hello\n\n  \nmy cat \n")

    assert (done.returncode, done.stderr.count("platform: cpu")) == (0, 1)
    first, second = map(json.loads, done.stdout.splitlines())
    assert first == {"prompt": "hello", "answer": answered(run / "hf", "user:hello\na:", 32)}
    assert second == {"prompt": "my cat ", "answer": answered(run / "hf", "user:my cat \na:", 32)}
    assert first["answer"] != second["answer"]


def test_a_line_may_be_a_conversation(run):
    """Its own system message replaces that of the run."""
    turns = [("user", "one"), ("assistant", "two"), ("user", "hello")]
    said = [{"role": role, "content": text} for role, text in turns]
    lines = [json.dumps(said), json.dumps([{"role": "system", "content": "be odd"}, *said])]

    done = ask(run, "--json", prompts="\n".join(lines))

    assert done.returncode == 0, done.stderr
    found = [json.loads(line)["answer"] for line in done.stdout.splitlines()]
    told = "user:one\nassistant:two\nuser:hello\na:hey"
    (stop,) = load_config(run / "config.yaml").rollout.stop
    expected = [answered(run / "hf", f"system:be {way}\n{told}", 5) for way in ("kind", "odd")]
    assert found == [text[: text.find(stop) + 1] if stop in text else text for text in expected]


def test_a_run_answers_as_it_was_trained_and_as_it_began(run):
    done = ask(run, "--compare", prompts="hello\nmy cat")

    assert done.returncode == 0, done.stderr
    (stop,) = load_config(run / "config.yaml").rollout.stop
    expected = []
    for prompt in ("hello", "my cat"):
        for name, directory in (("before:", "start"), ("after: ", "hf")):
            said = answered(run / directory, f"system:be kind\nuser:{prompt}\na:hey", 5)
            said = said[: said.find(stop) + 1] if stop in said else said
            expected.append(f"{name} {said}".replace("\n", "\n" + " " * 8))
    assert done.stdout == "\n".join(expected) + "\n"
    assert len(set(expected)) >= 3
    assert any(len(one) < 8 + 5 for one in expected)  # a stop string ends it
    assert "> my cat\n" in done.stderr
    assert "answers come from the rollout engine transformers; the run uses megatron\n" in done.stderr


def test_lines_are_read_as_they_come(monkeypatch):
    ours, theirs = os.pipe()
    with os.fdopen(ours) as file:
        monkeypatch.setattr(sys, "stdin", file)
        batches = _batches()
        os.write(theirs, "a\n\r\n\xe4".encode()[:-1])
        assert next(batches) == {1: "a"}
        os.write(theirs, "\xe4\r\n".encode()[1:] + b"x\n" * 70 + b"end")
        os.close(theirs)
        second, third, last = batches
    assert second == {3: "\xe4"} | dict.fromkeys(range(4, 67), "x")
    assert third == dict.fromkeys(range(67, 74), "x")
    assert last == {74: "end"}


@pytest.mark.slow
def test_samples_follow_from_the_seed_and_the_line(run):
    options = ("--plain", "--json", "--temperature", "1", "--max-new-tokens", "20", "--seed")
    found = [ask(run / "hf", *options, seed, prompts="hello\n" * 3).stdout for seed in ("1", "1", "2")]

    one, again, other = ([json.loads(line)["answer"] for line in text.splitlines()] for text in found)
    assert one == again
    assert len({*one, *other}) == 6


def test_an_answer_is_shown_and_not_obeyed(tmp_path):
    directory = write_model(tmp_path / "evil", 3, prefix="\x1b\x7f\u202e\x9b", template=None)

    text, quoted = ask(directory), ask(directory, "--json")

    for done in (text, quoted):
        assert (done.returncode, obeyed(done.stdout + done.stderr)) == (0, set())
    assert text.stdout.count("\\x1b\\x7f\\u202e\\u009b") == 32
    assert json.loads(quoted.stdout)["answer"].count("\x1b\x7f\u202e\x9b") == 32


@pytest.mark.parametrize(("ending", "status"), [("ctrl-d", 0), ("ctrl-c", 130)])
def test_at_a_terminal_a_line_is_edited_and_the_end_is_clean(run, ending, status):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "chat", str(run / "hf"), "--max-new-tokens", "4"], stdin=theirs, stdout=theirs,
        stderr=subprocess.PIPE, text=True, start_new_session=True, env=os.environ | {"ANYTRON_PLATFORM": "cpu"},
    )  # fmt: skip
    os.close(theirs)

    def shown_until(text):
        found = ""
        while not found.endswith(text):
            assert select.select([ours], [], [], 100)[0], found
            found += os.read(ours, 1).decode()
        return found

    shown_until("> ")
    os.write(ours, b"a" * 70 + b"\n")  # longer than the context: an error, and the next prompt
    shown_until("> ")
    os.write(ours, b"hellx\x7fo\n")
    expected = answered(run / "hf", "user:hello\na:", 4).replace("\n", "\r\n")
    assert f"\r\n{expected}\r\n" in shown_until(f"{expected}\r\n> ")
    if ending == "ctrl-d":
        os.write(ours, b"\x04")
    else:
        # A signal between the prompt and the wait for a key would be seen only with the next key (CPython's readline).
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == status, said
    assert "error: A prompt is too long for the model." in said
    assert "it has 78 tokens, and an answer may have 4, but the model's context has 64" in said
    assert "Traceback" not in said
    assert "Aborted" not in said


# ---- mistakes -----------------------------------------------------------------------------------------


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """A function that calls the command and returns its error; a process of a model may not start."""
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    monkeypatch.setattr(LocalExecutor, "start", lambda *_: pytest.fail("a process was started"))

    def refused(path, *overrides, prompts="hello\n", **options):
        (tmp_path / "prompts").write_bytes(prompts.encode("latin-1"))
        usual = {
            "compare": False, "max_new_tokens": None, "temperature": 0.0, "system": None, "plain": False, "seed": 0,
            "as_json": False,
        }  # fmt: skip
        with (tmp_path / "prompts").open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            with pytest.raises(AnytronError) as raised:
                run_chat(path, overrides, **usual | options)
        return raised.value

    return refused


def test_a_path_without_a_model_says_what_is_missing(copy, refused, tmp_path):
    assert "no such file or directory" in refused(tmp_path / "nowhere").why
    assert "the only file that can be given is checkpoints/best" in refused(copy / "config.yaml").why
    (tmp_path / "empty").mkdir()
    assert "neither config.json (a model) nor config.yaml (a run)" in refused(tmp_path / "empty").why
    assert refused(tmp_path).fix == f"choose a run: anytron chat {copy}"
    (copy / "adapter").mkdir()
    (copy / "adapter" / "adapter_config.json").touch()
    assert refused(copy / "adapter").fix == f"give the run's directory: anytron chat {copy}"
    shutil.rmtree(copy / "hf")
    assert refused(copy).what == "The run has not saved a model yet."
    (copy / "checkpoints" / "step-000003").mkdir(parents=True)
    assert refused(copy / "checkpoints").what == "No complete checkpoint was found."


def test_a_comparison_needs_the_model_at_the_start(copy, refused):
    bare = refused(copy / "start", compare=True)
    assert (bare.what, bare.fix) == (
        "The model that the run began with is not known.",
        "give the directory of a run: anytron chat RUN --compare",
    )
    assert refused(copy / "hf", compare=True).fix == f"give the run's directory: anytron chat {copy} --compare"
    gone = copy.with_name("gone")
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("path: start", f"path: {gone}"))
    error = refused(copy, compare=True)
    assert (error.where, error.fix) == (
        str(gone),
        "restore the directory; if it was moved, add model.path=DIRECTORY",
    )
    moved = find_beginning(find_model(copy), copy, [f"model.path={copy / 'start'}"])
    assert moved.place == copy / "start"


@pytest.mark.parametrize(
    ("damage", "what", "why"),
    [
        (
            lambda path: path.write_bytes(path.read_bytes()[:-8]),
            "A file of weights cannot be read.",
            "its header requires",
        ),
        (lambda path: path.write_bytes(b"\xff" * 99), "A file of weights cannot be read.", "cut short"),
        (lambda path: path.write_bytes(b"\x04" + bytes(7) + b"true"), "A file of weights cannot be read.", "header"),
        (Path.unlink, "The model directory cannot be used.", "has no weights"),
        (lambda path: path.rename(path.with_name("pytorch_model.bin")), "no safetensors file", "pytorch_model.bin"),
    ],
    ids=["cut short", "random", "no header", "missing", "pickled"],
)
@pytest.mark.parametrize("place", ["hf", "start"])
def test_weights_that_cannot_be_read_are_found_first(copy, refused, place, damage, what, why):
    damage(copy / place / "model.safetensors")

    error = refused(copy, compare=True)

    assert what in error.what
    assert why in error.why
    assert str(copy / place) in error.where


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda weights: weights | {"model.norm.weight": torch.full((32,), torch.nan)}, "outputs are not finite"),
        (lambda weights: {name: one for name, one in weights.items() if "q_proj" not in name}, "weight is missing"),
    ],
    ids=["nan", "missing"],
)
def test_weights_that_make_no_model_get_no_answer(copy, change, what):
    file = copy / "hf" / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})

    done = ask(copy)

    assert (done.returncode, done.stdout) == (1, "")
    assert what in done.stderr
    assert f"  where: {copy / 'hf'}" in done.stderr
    assert re.search(r"\n  fix: .*directory", done.stderr)


def test_a_directory_without_tokenizer_is_not_given_an_empty_one(copy, refused):
    for file in (copy / "hf").glob("tokenizer*"):
        file.unlink()
    assert refused(copy / "hf").fix == f"set a tokenizer: anytron chat {copy / 'hf'} model.tokenizer=DIRECTORY"


@pytest.mark.parametrize(
    ("overrides", "options", "why"),
    [
        ((), {"prompts": " \n\n"}, "it ended without a line of text"),
        ((), {"prompts": "hello\n\xff\n"}, "can't decode byte 0xff"),
        ((), {"max_new_tokens": 64}, "the model's context, which has 64 tokens"),
        (("rollout.engine=megatron",), {}, "it generates on the training ranks"),
        (("rollout.engine=nobody_has_it",), {}, "the installed distributions offer"),
        (("trainer.total_steps=3",), {}, "rollout can have an effect"),
        ((), {"system": "hello", "plain": True}, "--plain leaves out the chat template"),
    ],
)
def test_what_cannot_be_answered_is_said_before_a_process_starts(run, refused, overrides, options, why):
    assert why in refused(run, *overrides, **options).why


# ---- checkpoints --------------------------------------------------------------------------------------


def test_a_checkpoint_is_found_by_every_path_to_it(copy):
    shutil.rmtree(copy / "hf")
    directory = CheckpointDirectory(copy / "checkpoints")
    config = {"model": {"path": "gone"}, "data": {"source": "jsonl"}, "rewards": [{"function": "exact_match"}]}
    for step in (1, 2):
        training = directory.begin(step)
        (training / "state").touch()
        state = DriverState(
            step=step, sampler=(SourceState(epoch=0, position=0, prompts=1),), weights_version=step, config=config
        )
        directory.commit(state, {"state": FileRecord.of(training / "state")})
    Best(step=1, metric="m", direction="max", value=1.0).write(directory.path)

    first, second = (directory.path / f"step-00000{step}" for step in (1, 2))
    found = {path: find_model(path) for path in (copy, directory.path, second, first, directory.path / "best")}
    assert [one.place for one in found.values()] == [second, second, second, first, first]
    assert found[copy].run == copy
    assert found[second].run is None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_checkpoint_answers_as_the_exported_model(tmp_path):
    made = anytron(
        "train", EXAMPLE, "trainer.total_steps=1", f"trainer.output_dir={tmp_path}/run", ANYTRON_PLATFORM="cpu"
    )
    assert made.returncode == 0, made.stderr
    exported = ask(tmp_path / "run", "--compare", "--json", prompts="4312>\n")
    shutil.rmtree(tmp_path / "run" / "hf")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"

    of_run = ask(tmp_path / "run", "--compare", "--json", prompts="4312>\n")
    untrusted = ask(checkpoint, "--json", prompts="4312>\n")
    named = ask(checkpoint, "--json", f"model.tokenizer={ROOT}/examples/sort_digits.py:tokenizer", prompts="4312>\n")

    assert of_run.stdout == exported.stdout
    assert "does not run a function that only a checkpoint names" in untrusted.stderr
    assert json.loads(named.stdout)["answer"] == json.loads(exported.stdout)["after"]
