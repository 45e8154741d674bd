"""A run reads clock, time zone and chat template once: resumed elsewhere on another day, it is the same run."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers.utils import chat_template_utils
from typer.testing import CliRunner

from anytron.base.errors import DataError
from anytron.cli.main import app
from anytron.record.checkpoint.directory import CheckpointDirectory
from anytron.run.preflight import prepare as preparing
from anytron.run.preflight.prepare import prepare, prepare_held_out, prepare_prompts
from anytron.run.rollout.conversation import observation_tokens
from anytron.task.data import beginning
from anytron.task.environments import Observation
from tests.core.run.trainer.disturbed_runs import assert_equal, comparable, lines, output, steps

DATED = """
import os

TEMPLATE = (
    "{% if messages[0].role == 'user' %}{{ strftime_now('%d%H%M') }}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


def dated_tokenizer():
    made = tokenizer()
    made.chat_template = os.environ.get("TEST_TEMPLATE", TEMPLATE)
    return made


def dated(count, digits):
    for one in prompts(count=count, digits=digits):
        yield replace(one, text=None, messages=[{"role": "user", "content": one.text}])


def dated_examples(count, digits):
    for one in dated(count, digits):
        yield replace(one, data={"response": one.data["answer"]})
"""
SOURCE = {"source": "task.py:dated", "options": {"count": 16, "digits": 3}}
MODEL = {"tokenizer": "task.py:dated_tokenizer"}
FIRST = datetime(2026, 11, 25, 23, 58, tzinfo=timezone(timedelta(hours=5, minutes=30)))


@pytest.fixture
def clock(monkeypatch):
    """The clock of the process, which can be set; and transformers' own, which nothing may read."""

    class Unread:
        @staticmethod
        def now():
            raise AssertionError("the chat template reads the clock of transformers")

    def set_to(moment, zone="UTC"):
        monkeypatch.setattr(beginning, "present", lambda: moment)
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    monkeypatch.setattr(chat_template_utils, "datetime", Unread)
    set_to(FIRST, "Asia/Kolkata")
    yield set_to
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def dated_run(new_run):
    def make(**sections):
        validation = {"every_steps": 1, "sets": [{"name": "held", "data": SOURCE}]}
        data = {**SOURCE, "prompts_per_step": 4}
        return new_run(
            DATED,
            **{"model": model_of(new_run), "data": data, "validation": validation, **sections},
        )

    return make


def model_of(new_run):
    return {**new_run().config.model.model_dump(include={"config", "dtype"}), **MODEL}


def elsewhere(clock, monkeypatch):
    """Another day, another time zone, another language, another template in the model's directory."""
    clock(FIRST + timedelta(days=3, hours=5), "America/Los_Angeles")
    for name in ("LANG", "LC_ALL", "LC_TIME"):
        monkeypatch.setenv(name, "de_DE.UTF-8")
    monkeypatch.setenv("TEST_TEMPLATE", "{{ strftime_now('%Y') }}{{ messages[0].content }}")


@pytest.mark.slow
def test_a_run_that_is_resumed_on_another_day_equals_one_that_was_not(dated_run, clock, monkeypatch, tmp_path):
    whole = tmp_path / "whole"
    dated_run(trainer={"total_steps": 3, "output_dir": str(whole)}).train()
    assert {one["prompt"][:6] for one in lines(whole / "samples.jsonl")} == {"252358"}
    assert any("validation" in one for one in lines(whole / "samples.jsonl"))
    trainer = {"total_steps": 1, "output_dir": str(output(dated_run))}
    dated_run(trainer=trainer).train()
    elsewhere(clock, monkeypatch)
    again = dated_run(trainer={**trainer, "total_steps": 3}, resume="auto")
    again.train()
    model = load_file(whole / "hf" / "model.safetensors")
    assert_equal(output(dated_run), (comparable(whole), lines(whole / "samples.jsonl"), model))
    assert any("the chat template has changed" in note for note in again.progress.notes)
    saved = json.loads((output(dated_run) / "hf" / "tokenizer_config.json").read_text())
    kept = saved.get("chat_template") or (output(dated_run) / "hf" / "chat_template.jinja").read_text()
    assert "%d%H%M" in kept
    for step in steps(output(dated_run)):
        directory = CheckpointDirectory(output(dated_run) / "checkpoints")
        (checkpoint,) = [one for one in directory.complete() if one.step == step]
        assert checkpoint.state().beginning.now == FIRST


@pytest.mark.parametrize("twin", ["the-clock-goes-on", "the-template-is-read-again"])
def test_a_run_that_reads_them_again_is_noticed(dated_run, clock, monkeypatch, twin):
    dated_run(trainer={"total_steps": 1}).train()
    elsewhere(clock, monkeypatch)
    if twin == "the-clock-goes-on":
        monkeypatch.delenv("TEST_TEMPLATE")
        monkeypatch.setattr(preparing, "first_beginning", lambda config: None)
    else:
        real = preparing.first_beginning

        def only_the_moment(config):
            template = os.environ["TEST_TEMPLATE"]
            return real(config).model_copy(update={"chat_template": template})

        monkeypatch.setattr(preparing, "first_beginning", only_the_moment)
    with pytest.raises(DataError, match="prompts have changed since the checkpoint"):
        dated_run(trainer={"total_steps": 2}, resume="auto").train()


def test_a_new_run_from_a_checkpoint_goes_on_with_its_moment_and_one_with_other_data_with_its_own(
    dated_run, clock, tmp_path
):
    dated_run(trainer={"total_steps": 1}).train()
    later = FIRST + timedelta(days=40)
    clock(later)
    branch = {"trainer": {"total_steps": 2, "output_dir": str(tmp_path / "branch")}, "resume": str(output(dated_run))}
    run = dated_run(**branch)
    run.train()
    assert run.progress.steps[0]["step"] == 2
    assert json.loads((tmp_path / "branch" / "run.json").read_text())["beginning"]["now"] == FIRST.isoformat()
    other = dated_run(**{**branch, "data": {**SOURCE, "prompts_per_step": 4, "shuffle": False}})
    assert prepare(other.config).beginning.now == later


def test_turns_of_an_environment_and_examples_show_the_first_moment_too(new_run, clock, monkeypatch):
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}{{ strftime_now('%H%M') }}{% endif %}"
    monkeypatch.setenv("TEST_TEMPLATE", template + "{% endfor %}")
    prepared = prepare(new_run(DATED, model=model_of(new_run), data={**SOURCE, "prompts_per_step": 4}).config)
    clock(FIRST + timedelta(days=1, hours=3))
    asked = Observation(messages=[{"role": "user", "content": "7>"}])
    known = prepared.tokenizer, prepared.vocab_size, prepared.chat_template_kwargs
    assert prepared.tokenizer.decode(observation_tokens(asked, None, *known)) == "7>2358"
    monkeypatch.delenv("TEST_TEMPLATE")

    clock(FIRST)
    examples = {"source": "task.py:dated_examples", "options": {"count": 4, "digits": 3}}
    validation = {"sets": [{"name": "held", "data": examples}]}
    sft = {"algorithm": {"name": "sft"}, "rewards": [], "data": examples, "validation": validation}
    taught = prepare_prompts(new_run(DATED, model=model_of(new_run), **sft).config)
    (held,) = prepare_held_out(new_run(DATED, model=model_of(new_run), **sft).config, taught)
    texts = {prepared.tokenizer.decode(one.tokens)[:6] for one in [*taught.draw(2), *held.prepared.draw(2)]}
    assert texts == {"252358"}


def test_data_show_says_that_the_template_reads_the_clock_and_which_moment_it_shows(dated_run, clock):
    dated_run(trainer={"total_steps": 1}).train()
    file = Path(output(dated_run)) / "config.yaml"
    clock(FIRST + timedelta(days=2, minutes=1), "UTC")

    def show(*arguments):
        done = CliRunner().invoke(app, ["data", "show", str(file), "-n", "1", *arguments], catch_exceptions=False)
        return done.stdout

    said = show()
    assert "(strftime_now): %d%H%M is 272359. Prompts show the time at which this" in said
    again = json.loads(show("resume=auto", "--json"))
    assert again["clock"] == {"moment": FIRST.isoformat(), "of": "the run", "shown": {"%d%H%M": "252358"}}
    assert again["prompts"][0]["text"].startswith("252358")
    task = file.parents[1] / "config" / "task.py"
    plain = show(f"model.tokenizer={task}:tokenizer", f"data.source={task}:prompts", "validation=null", "--json")
    assert json.loads(plain)["clock"] is None
