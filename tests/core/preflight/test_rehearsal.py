"""Can a reward be earned on these data, and is it not earned for nothing: ``anytron data check``."""

from __future__ import annotations

import itertools
import json

import pytest
from typer.testing import CliRunner

from anytron.cli.main import app
from anytron.config.imports import resolve
from anytron.config.load import load_config
from anytron.data import pretrained
from anytron.data.prompts import TokenizedPrompt
from anytron.data.thoughts import decode_responses, opened
from anytron.errors import AnytronError, DataError
from anytron.preflight.prepare import prepare
from anytron.preflight.rehearsal import evenly, rehearse
from anytron.rewards import Sample
from anytron.rewards.patterns import Format, Regex
from anytron.rollout.trajectory import Trajectory
from anytron.trainer.loop import require_earnable
from anytron.trainer.trajectories import make_samples
from tests.house import ROOT

EXAMPLES = ROOT / "examples"
SORT = EXAMPLES / "grpo_sort.yaml"
ROWS = [{"prompt": f"{one}{one + 1}>", "answer": str(one * 11 + 10)} for one in range(1, 5)]
TOKENIZER = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
from sort_digits import tokenizer as plain

def begun():
    made = plain()
    made.add_special_tokens({{"bos_token": "<extra0>"}})
    made.chat_template = "<extra0>{{{{ messages[0].content }}}}"
    return made

def chat():
    made = plain()
    made.chat_template = "{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}" \\
        "{{% if add_generation_prompt %}}><think>\\n{{% endif %}}"
    return made

def padded():
    made = plain()
    made.add_special_tokens({{"pad_token": "[PAD]"}})
    return made
"""
REWARDS = """
def constant(samples):
    return [1.0 for _ in samples]

def never(samples):
    return [0.0 for _ in samples]

class Told:
    def right_answer(self, data):
        return data["answer"][::-1]

    def __call__(self, samples):
        return [float(sample.response_text == sample.data["answer"][::-1]) for sample in samples]

def raises(samples):
    return [samples[0].data["gone"] for _ in samples]
"""


def check(*arguments):
    return CliRunner().invoke(app, ["data", "check", *map(str, arguments)], catch_exceptions=True)


def changed(row, **values):
    """The rows with one of them broken."""
    return [{**one, **values} if place == row else one for place, one in enumerate(ROWS)]


def overrides(tmp_path, rows, *keys, rewards="[{function: exact_match}]"):
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tok.py").write_text(TOKENIZER)
    (tmp_path / "r.py").write_text(REWARDS)
    rewards = rewards.replace("r.py", f"{tmp_path}/r.py")
    keys = [key.replace("tok.py", f"{tmp_path}/tok.py") for key in keys]
    return [
        f"data={{source: jsonl, options: {{path: {tmp_path}/p.jsonl}}, shuffle: false}}",
        f"rewards={rewards}",
        *keys,
    ]


def lacks_answer(row):
    return [
        {key: value for key, value in one.items() if place != row or key != "answer"} for place, one in enumerate(ROWS)
    ]


def function(name, **options):
    return f"[{{function: {name}, options: {json.dumps(options)}}}]"


BROKEN = {
    "a null answer": (changed(1, answer=None), [], None, "line 2", "data.on_bad_answer=drop"),
    "no answer": (lacks_answer(2), [], None, "line 3", "option key"),
    "an empty answer": (changed(0, answer=" "), [], function("contains"), "line 1", "data.on_bad_answer=drop"),
    "a float": (changed(3, answer=3.0), [], None, "line 4", "whole number"),
    "a list": (changed(3, answer=["3"]), [], None, "line 4", "it is list"),
    "another answer's column": (ROWS, [], function("exact_match", key="solution"), "line 1", "option key"),
    "a price that math does not read": (
        changed(2, answer="$"),
        [],
        function("math"),
        "line 3",
        "correct the",
    ),
    "an answer in the prompt": (changed(1, answer="23"), [], function("contains"), "line 2", "reads the answer alone"),
    "a pattern of everything": (ROWS, [], function("format", pattern=".*"), "line 1", "stricter pattern"),
    "a pattern of nothing": (ROWS, [], function("format", pattern="Q.*Q"), "line 1", "ask for a form"),
    "no room for the answer": (changed(1, answer="12345"), [], None, "line 2", "raise rollout.max_new_tokens"),
    "a constant": (ROWS, [], function("r.py:constant"), "line 1", "stricter pattern"),
    "a function that never rewards": (ROWS, [], function("r.py:never"), "line 1", "ask for a form"),
    "a function that raises": (ROWS, [], function("r.py:raises"), "line 1", "correct the function"),
    "two beginnings": (
        [{**one, "prompt": f"<extra0>{one['prompt']}"} for one in ROWS],
        ["model.tokenizer=tok.py:begun", "data.options.chat=true"],
        None,
        "line 1",
        "remove <extra0>",
    ),
    "an end behind the prompt": (changed(1, prompt="23><eos>"), [], None, "line 2", "remove it from the prompts"),
    "an assistant's message at the end": (
        changed(1, prompt=[{"role": "user", "content": "2"}, {"role": "assistant", "content": "so"}]),
        ["model.tokenizer=tok.py:chat"],
        None,
        "line 2",
        "data.continue_final_message=true",
    ),
    "padding beyond the model": (ROWS, ["model.tokenizer=tok.py:padded"], None, "[PAD]", "set pad_token"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_copy_is_named_with_row_and_remedy(name, tmp_path):
    rows, keys, rewards, row, remedy = BROKEN[name]
    done = check(SORT, *overrides(tmp_path, rows, *keys, **({} if rewards is None else {"rewards": rewards})))
    assert done.exit_code == 1, done.output
    said = str(done.exception) if isinstance(done.exception, AnytronError) else " ".join(done.stdout.split())
    assert row in said, said
    assert remedy in said, said
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


@pytest.mark.parametrize("rewards", [function("exact_match"), function("contains"), function("math")])
def test_whole_data_are_clean(rewards, tmp_path):
    done = check(SORT, *overrides(tmp_path, ROWS, rewards=rewards), "--json")
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout).values()
    assert list(found["tried"].values()) == [4]
    assert not found["findings"]


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.name)
def test_every_example_is_clean(file, tmp_path, tokenizer):
    text = file.read_text()
    count = [] if "stages:" in text else ["data.options.count=64"]
    if "path: ../runs/" in text:  # another example's model
        tokenizer.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(load_config(SORT, []).model.config))
        count.append(f"{'teacher' if 'teacher:' in text else 'model'}.path={tmp_path}")
    done = check(file, *count)
    assert done.exit_code == 0, done.output


def test_what_is_dropped_is_counted_and_the_rest_is_as_it_was(tmp_path):
    keys = overrides(tmp_path, changed(1, answer=None), "data.on_bad_answer=drop")
    assert check(SORT, *keys).exit_code == 0
    sampler = prepare(load_config(SORT, keys)).sampler
    assert [one.id for one in sampler.tables[0]] == ["line 1", "line 3", "line 4"]
    assert sampler.remarks == ["prompts of p.jsonl: 3 of 4, without 1 with an answer that rewards cannot read"]
    with pytest.raises(
        DataError, match=r"(?s)No prompt of a source is left.*4 have an answer that rewards cannot read"
    ):
        prepare(
            load_config(SORT, overrides(tmp_path, [{**one, "answer": None} for one in ROWS], "data.on_bad_answer=drop"))
        )


def test_a_parquet_row_without_the_column_has_a_null_and_is_named(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"prompt": "1>", "graded": {"answer": "1"}}, {"prompt": "2>", "graded": {"style": "rule"}}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    options = f"{{path: {tmp_path}/p.parquet, columns: {{answer: graded.answer}}}}"
    done = check(SORT, f"data={{source: parquet, options: {options}}}", "rewards=[{function: contains}]")
    assert done.exit_code == 1
    with pytest.raises(DataError, match=r"(?s)prompt row 2, for rewards\[0\] \(contains\).*it is null.*does not have"):
        raise done.exception


def test_bad_answers_are_counted_and_named(tmp_path):
    rows = [{**one, "answer": None} if place else one for place, one in enumerate(ROWS)]
    with pytest.raises(DataError, match=r"(?s)prompt line 2, for.*it is null.*so are 2 others: line 3, line 4"):
        prepare(load_config(SORT, overrides(tmp_path, rows)))


class Told:
    """What a run says."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)

    warn = note


def test_training_refuses_only_what_is_certain_and_looks_at_few(tmp_path):
    rows = [{"prompt": f"{one}>", "answer": "$"} for one in range(100, 200)]
    prepared = prepare(load_config(SORT, overrides(tmp_path, rows, rewards=function("math"))))
    with prepared.rewards.start(tmp_path / "logs", 60) as workers:
        with pytest.raises(DataError, match=r"(?s)math cannot be earned.*all others that were tried"):
            require_earnable(prepared, workers, Told())
        assert rehearse(prepared, workers, seconds=0.0).tried.get("math", 0) <= 4
    rows = [{**one, "answer": "12"} for one in rows[1:]] + rows[:1]
    prepared = prepare(load_config(SORT, overrides(tmp_path, rows, rewards=function("math"))))
    with prepared.rewards.start(tmp_path / "logs", 60) as workers:
        require_earnable(prepared, workers, told := Told())
        assert rehearse(prepared, workers, rows=32).tried["math"] <= 32
    assert len(told.lines) == 1


def test_a_class_says_what_its_right_answer_is(tmp_path):
    rows = [{"prompt": "1>", "answer": "12"}, {"prompt": "2>", "answer": "34"}]
    done = check(SORT, *overrides(tmp_path, rows, rewards=function("r.py:Told")))
    assert done.exit_code == 0, done.output


def test_prompts_are_chosen_evenly():
    tables = [list(range(100)), list(range(7))]
    assert len(evenly(tables, None)) == 107
    chosen = evenly(tables, 32)
    assert 24 <= len(chosen) <= 32
    assert {b - a for a, b in itertools.pairwise(chosen[:20])} == {4}


def test_a_pattern_sees_the_thought_that_the_prompt_opens():
    pattern = Format(pattern="<think>.*</think>.*")

    def sample(response, before):
        return Sample(
            "p", f"q{before}", response, (1,), (), (), finished=True, data={"answer": "4"}, opened=opened(before)
        )

    assert pattern([sample("so\n</think>4", "<think>\n"), sample("<think>so</think>4", "")]) == [1, 1]
    assert pattern([sample("so\n</think>4", ""), sample("so", "<think>\n"), sample("", "<think></think>")]) == [0, 0, 0]
    assert Regex(pattern="<think>.*</think>(.*)")([sample("so</think>4", "<think>")]) == [1]


@pytest.fixture
def tokenizer():
    return resolve(f"{EXAMPLES}/sort_digits.py:tokenizer", pretrained.TOKENIZER)()


def test_marks_of_thought_reach_rewards_also_as_special_tokens(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    start, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert decode_responses(tokenizer, [(start, 1, end, 3, 11), ()]) == ["<think>1</think>3", ""]
    prompt = TokenizedPrompt("p", "3><think>", (3, 10, start), {})
    one_turn = Trajectory((1, end, 3), (0.0,) * 3, finished=True)
    turns = Trajectory((1, end, 5, start, 3), (0.0,) * 5, finished=True, response_mask=(True, True, False, False, True))
    closed = Trajectory((1, 5, 3), (0.0,) * 3, finished=True, response_mask=(True, False, True))
    samples = make_samples([prompt], [[one_turn, turns, closed]], tokenizer)
    assert [one.opened for one in samples] == ["<think>", "<think>", ""]
    assert samples[0].last_message == "<think>1</think>3"


def test_a_response_may_continue_the_assistants_last_message(tmp_path):
    messages = [{"role": "user", "content": "2"}, {"role": "assistant", "content": "47"}]
    keys = overrides(
        tmp_path, changed(1, prompt=messages), "model.tokenizer=tok.py:chat", "data.continue_final_message=true"
    )
    prepared = prepare(load_config(SORT, keys))
    assert [one.text for one in prepared.sampler.tables[0]][1] == "247"
