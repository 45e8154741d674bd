"""Whether a reward tells right answers from wrong ones: ``anytron data check``."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from anytron.base.errors import AnytronError, DataError
from anytron.cli.main import app
from anytron.config.imports import resolve
from anytron.config.load import load_config
from anytron.config.scoring import RewardSection
from anytron.run.preflight.forms import right_forms
from anytron.run.preflight.prepare import prepare
from anytron.run.preflight.rehearsal import Evenly
from anytron.run.trainer.experience import make_samples
from anytron.task.data import pretrained
from anytron.task.data.decoding import decode_responses
from anytron.task.data.prompts import TokenizedPrompt
from anytron.task.data.thoughts import opened
from anytron.task.rewards import Sample
from anytron.task.rewards.matching import Format, Regex
from anytron.task.rewards.math import Math
from anytron.workers.engines.rollout_engine import Response
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

def tagged(samples):
    return [float(f"<answer>{sample.data['answer']}</answer>" in sample.response_text) for sample in samples]

class Told:
    def right_answer(self, data):
        return data["answer"][::-1]

    def __call__(self, samples):
        return [float(sample.response_text == sample.data["answer"][::-1]) for sample in samples]

def raises(samples):
    return [samples[0].data["gone"] for _ in samples]
"""


PIECES = [
    "$",
    "\\$",
    ".",
    "{",
    "}",
    "(",
    ")",
    ",",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "\\boxed{",
    "\\text{}",
    "7",
    "x",
    "=",
    "%",
    " ",
    "-",
    "\\frac{1}{2}",
    "and",
    "cm",
]
"""Of right answers, whole and broken."""


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
    "no answer": (lacks_answer(2), [], None, "line 3", "option 'key'"),
    "an empty answer": (changed(0, answer=" "), [], function("contains"), "line 1", "data.on_bad_answer=drop"),
    "a float": (changed(3, answer=3.0), [], None, "line 4", "whole number"),
    "a list": (changed(3, answer=["3"]), [], None, "line 4", "but is list"),
    "another answer's column": (ROWS, [], function("exact_match", key="solution"), "line 1", "option 'key'"),
    "a price that math does not read": (
        changed(2, answer="$"),
        [],
        function("math"),
        "line 3",
        "data.on_bad_answer=drop",
    ),
    "an answer in the prompt": (changed(1, answer="23"), [], function("contains"), "line 2", "reads the answer alone"),
    "a pattern of everything": (ROWS, [], function("format", pattern=".*"), "line 1", "stricter pattern"),
    "a pattern of nothing": (ROWS, [], function("format", pattern="Q.*Q"), "line 1", "ask for a form"),
    "no room for the answer": (changed(1, answer="12345"), [], None, "line 2", "raise rollout.max_new_tokens"),
    "a constant": (ROWS, [], function("r.py:constant"), "line 1", "stricter pattern"),
    "a function that never rewards": (ROWS, [], function("r.py:never"), "line 1", "ask for a form"),
    "a function that raises": (ROWS, [], function("r.py:raises"), "line 1", "return 0 for a response"),
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


@pytest.mark.some(9)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_copy_is_named_with_row_and_remedy(name, tmp_path):
    rows, keys, rewards, row, remedy = BROKEN[name]
    done = check(SORT, *overrides(tmp_path, rows, *keys, **({} if rewards is None else {"rewards": rewards})))
    assert done.exit_code == 1, done.output
    if isinstance(done.exception, AnytronError):
        said = str(done.exception)
        assert row in said, said
        assert remedy in said, said
        return
    columns = findings(done.stdout)
    assert row in columns["row"]
    assert remedy in columns["remedy"]
    assert columns["finding"]
    assert columns["example"]
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def findings(printed):
    """What stands in each column of the table of findings."""
    lines = printed.splitlines()
    head = lines.index(next(line for line in lines if line.split() == ["row", "finding", "example", "remedy"]))
    body = itertools.takewhile(lambda line: not line.startswith("what "), lines[head + 1 :])
    begins = [*(lines[head].index(name) for name in ("row", "finding", "example", "remedy")), None]
    columns = {name: [] for name in lines[head].split()}
    for line in body:
        for name, (begin, end) in zip(columns, itertools.pairwise(begins), strict=True):
            columns[name] += line[begin:end].split()
    return {name: " ".join(words) for name, words in columns.items()}


def test_each_form_stands_in_a_matrix_with_its_scores(tmp_path):
    keys = overrides(tmp_path, ROWS, rewards=function("r.py:tagged"))
    printed = check(SORT, *keys).stdout
    (head,) = [place for place, line in enumerate(printed.splitlines()) if line.startswith("form ")]
    shown = {line[:18].strip(): line.split()[-2:] for line in printed.splitlines()[head + 1 :]}
    assert shown.pop("<answer>") == shown.pop("</think>, <answer>") == ["1", "1"]
    assert len(shown) == 11
    assert {"bare", "boxed", "behind </think>", "in a sentence", "an empty response", "the word None"} < shown.keys()
    assert all(scores == ["0", "0"] for scores in shown.values())
    (found,) = json.loads(check(SORT, *keys, "--json").stdout).values()
    assert found["example"] == {"tagged": "line 1"}
    form = found["scores"]["tagged"]["<answer>"]
    assert form == {"right": True, "written": "<answer>21</answer>", "first": 1.0, "mean": 1.0, "count": 4}


def test_what_is_printed_commands_no_terminal_and_stays_in_its_row(tmp_path):
    rows = changed(1, prompt="2[red]\x1b[2J\n3>", answer="[bold]\n\x1b[31m7[/]")
    done = check(SORT, *overrides(tmp_path, rows, rewards=function("r.py:never")))
    assert "\x1b" not in done.stdout
    assert "[bold]\\n\\x1b[31m7[/]" in findings(done.stdout)["example"].replace(" ", "")


@pytest.mark.parametrize("rewards", [function("exact_match"), function("contains"), function("math")])
def test_whole_data_are_clean(rewards, tmp_path):
    done = check(SORT, *overrides(tmp_path, ROWS, rewards=rewards), "--json")
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout).values()
    assert list(found["tried"].values()) == [4]
    assert not found["findings"]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "file", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda file: file.relative_to(EXAMPLES).as_posix()
)
def test_every_example_is_clean(file, tmp_path, tokenizer):
    """Those whose model or data are the user's get small ones, with the columns that their headers name."""
    text = file.read_text()
    keys = [] if "stages:" in text or "source: jsonl" in text else ["data.options.count=64"]
    if "path: ../" in text:  # another example's model, or a published one
        tokenizer.chat_template = "{{ messages[0].content }}>"
        tokenizer.save_pretrained(tmp_path)
        config = load_config(SORT, []).model.config | {"max_position_embeddings": 32768}
        (tmp_path / "config.json").write_text(json.dumps(config))
        keys.append(f"{'teacher' if 'teacher:' in text else 'model'}.path={tmp_path}")
    if "source: jsonl" in text:
        rows = [
            {**row, "prompt": [{"role": "user", "content": row["prompt"]}]} if "npu" in str(file) else row
            for row in ROWS
        ]
        (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
        keys.append(f"data.options.path={tmp_path}/p.jsonl")
    done = check(file, *keys)
    assert done.exit_code == 0, done.output


def test_what_is_dropped_is_counted_and_the_rest_is_as_it_was(tmp_path):
    keys = overrides(tmp_path, changed(1, answer=None), "data.on_bad_answer=drop")
    assert check(SORT, *keys).exit_code == 0
    sampler = prepare(load_config(SORT, keys)).sampler
    assert [one.id for one in sampler.tables[0]] == ["line 1", "line 3", "line 4"]
    why = "line 2: it is null: an empty cell, or a column that this row does not have"
    assert sampler.remarks == [f"prompts of p.jsonl: 3 of 4, without 1 with an answer that rewards cannot read ({why})"]
    with pytest.raises(
        DataError, match=r"(?s)Every prompt of a source was left out.*4 have an answer that rewards cannot read"
    ):
        prepare(
            load_config(SORT, overrides(tmp_path, [{**one, "answer": None} for one in ROWS], "data.on_bad_answer=drop"))
        )


def test_what_math_cannot_read_is_dropped_too_and_named_in_validation_as_well(tmp_path):
    rows = [*changed(2, answer="$"), {"prompt": "9>", "answer": "<think>"}]
    keys = overrides(tmp_path, rows, "data.on_bad_answer=drop", rewards=function("math"))
    found = json.loads(check(SORT, *keys, "--json").stdout)["training"]
    assert found["tried"] == {"math": 3}
    assert not found["findings"]
    (said,) = found["notes"]
    assert "3 of 5, without 2 with an answer that rewards cannot read (line 3: '$' is neither" in said
    assert said.endswith("line 5)")
    data = f"{{source: jsonl, options: {{path: {tmp_path}/p.jsonl}}}}"
    held = f"validation={{sets: [{{name: v, data: {data}}}], every_steps: 1}}"
    done = check(SORT, *keys, held)
    assert done.exit_code == 1
    with pytest.raises(
        DataError, match=r"(?s)training: validation set v: prompt line 3.*there is 1 other bad prompt: line 5"
    ):
        raise done.exception


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join))
def test_math_refuses_the_answers_that_no_response_earns_and_no_others(answer):
    """The prompt's own answer, bare, is right as soon as any form is; what is refused scores 0 in every form."""
    reward, prompt = Math(), TokenizedPrompt("p", "q", (1,), {"answer": answer})
    forms = right_forms(RewardSection(function="math"), answer.strip(), prompt)
    samples = [Sample("p", "q", text, (1,), (), (), finished=True, data=prompt.data) for text in forms.values()]
    if reward.examine_answer(answer) is None:
        assert reward(samples[:1]) == [1.0]
    else:
        assert not any(reward(samples))


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
    with pytest.raises(
        DataError, match=r"(?s)prompt line 2, for.*it is null.*there are 2 other bad prompts: line 3, line 4"
    ):
        prepare(load_config(SORT, overrides(tmp_path, rows)))


def test_a_class_says_what_its_right_answer_is(tmp_path):
    rows = [{"prompt": "1>", "answer": "12"}, {"prompt": "2>", "answer": "34"}]
    done = check(SORT, *overrides(tmp_path, rows, rewards=function("r.py:Told")))
    assert done.exit_code == 0, done.output


def test_prompts_are_chosen_evenly():
    tables = [list(range(100)), list(range(7))]
    assert list(Evenly(tables, None)) == [*range(100), *range(7)]
    chosen = list(Evenly(tables, 32))
    assert len(chosen) == len(Evenly(tables, 32))
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
    one_turn = Response((1, end, 3), (0.0,) * 3, "stop", (0,) * 3)
    mask = (True, True, False, False, True)
    turns = Response((1, end, 5, start, 3), (0.0,) * 5, "stop", (0,) * 3, response_mask=mask)
    closed = Response((1, 5, 3), (0.0,) * 3, "stop", (0,) * 2, response_mask=(True, False, True))
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
