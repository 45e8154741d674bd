"""``anytron data show``: what a run would draw, as its model reads it."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from typer.testing import CliRunner

from anytron.base.errors import ConfigError, DataError
from anytron.cli.main import app
from anytron.config.load import load_config
from anytron.run.preflight.prepare import prepare
from tests.house import ROOT

SORT = ROOT / "examples" / "grpo_sort.yaml"


def show(config, *arguments):
    return CliRunner().invoke(app, ["data", "show", str(config), *map(str, arguments)], catch_exceptions=True)


def jsonl(path, *records):
    path.write_text("\n".join(map(json.dumps, records)))
    return path


@pytest.fixture
def mix(tmp_path):
    """Two sources of digits: one prompt of each is too long, and one is in both."""
    jsonl(tmp_path / "short.jsonl", *({"prompt": f"{n}>", "answer": str(n)} for n in range(8)), {"prompt": "1" * 61})
    (tmp_path / "wide.csv").write_text("question,answer\n11>,11\n1>,1\n" + "2" * 99 + ",2\n")
    sources = [
        {"source": "jsonl", "options": {"path": str(tmp_path / "short.jsonl")}, "weight": 3},
        {
            "source": "csv",
            "options": {"path": str(tmp_path / "wide.csv"), "columns": {"prompt": "question"}},
            "weight": 1,
            "name": "wide",
        },
    ]
    return [f"data={json.dumps({'mix': sources, 'deduplicate': True})}"]


def test_it_shows_what_the_run_draws(mix):
    done = show(SORT, *mix, "-n", 6, "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    short, wide = shown["sources"]
    assert short == {
        "name": "short.jsonl",
        "share": 0.75,
        "read": 9,
        "kept": 8,
        "too_long": 1,
        "duplicates": 0,
        "tokens": {"min": 2, "mean": 2.0, "median": 2.0, "max": 2, "sum": 16},
    }
    assert [wide[key] for key in ("read", "kept", "too_long", "duplicates")] == [3, 1, 1, 1]
    run = prepare(load_config(SORT, mix))
    drawn = run.draw(6)
    assert [one["id"] for one in shown["prompts"]] == [one.id for one in drawn]
    assert [tuple(one["tokens"]) for one in shown["prompts"]] == [one.tokens for one in drawn]
    assert {one["id"] for one in shown["prompts"]} >= {"wide/line 2"}
    (eleven,) = {json.dumps(one) for one in shown["prompts"] if one["id"] == "wide/line 2"}
    assert json.loads(eleven) == {
        "id": "wide/line 2",
        "length": 3,
        "text": "11>",
        "tokens": [1, 1, 10],
        "pieces": ["1", "1", ">"],
        "response": [],
        "images": 0,
        "data": {"answer": "11"},
    }


def test_tokens_stand_between_bars_and_nothing_commands_the_terminal(tmp_path):
    data = jsonl(tmp_path / "p.jsonl", {"id": "a\x1b[31m", "prompt": "1" * 9 + "23>", "note": "\u202e\n"})
    done = show(SORT, f"data={{source: jsonl, options: {{path: {data}}}}}", "-n", 1)
    assert done.exit_code == 0, done.output
    assert "a\\x1b[31m: 12 tokens\n1 * 9|2|3|>\n" in done.stdout
    assert "\x1b[31m" not in done.stdout
    assert "\u202e" not in done.stdout
    assert show(SORT, "-n", 0).stdout.count("tokens\n") == 0


def test_pictures_count_as_the_tokens_that_they_become(tmp_path):
    for label in ("one", "two"):
        (tmp_path / label).mkdir()
        Image.new("RGB", (32, 32)).save(tmp_path / label / "a.png")
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    options = {"path": str(tmp_path), "prompt": f"{place}?", "chat": False}
    example = ROOT / "examples" / "grpo_count_shapes.yaml"
    done = show(example, f"data={json.dumps({'source': 'images', 'options': options})}", "data.shuffle=false", "-n", 2)
    assert done.exit_code == 0, done.output
    first, second = done.stdout.split("\n\n")[1:]
    assert first.startswith("one/a.png: ")
    assert ", 1 image\n" in first
    assert "<|image_pad|> * " in first
    assert '"label": "two"' in second


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (["data.options={path: gone.jsonl}", "data.source=jsonl"], DataError, "no such file"),
        (["data.options={pth: a}", "data.source=jsonl"], ConfigError, r"did you mean data\.options\.path"),
        (
            ["data.max_prompt_tokens=4"],
            DataError,
            "(?s)Every prompt of a source was left out.*4096 have more than 4 tokens.*has 5",
        ),
        (["data.mix=[{source: jsonl}]"], ConfigError, r"exactly one of data\.source and data\.mix"),
        (["rollout.max_new_tokens=64"], ConfigError, "no room for a prompt"),
    ],
)
def test_what_is_wrong_is_an_error(keys, error, message):
    done = show(SORT, *keys)
    assert isinstance(done.exception, error)
    with pytest.raises(error, match=message):
        raise done.exception


def test_of_an_example_it_says_what_is_learnt():
    config = ROOT / "examples" / "sft_then_grpo_sort.yaml"
    done = show(config, "stage=sft", "data.shuffle=false", "-n", 1)
    assert done.exit_code == 0, done.output
    assert "8|7|4|2|>|2|4|7|8|<eos>\nlearnt: 2|4|7|8|<eos>\n" in done.stdout
    (prompt,) = json.loads(show(config, "stage=sft", "-n", 1, "--json").stdout)["prompts"]
    assert (prompt["length"], prompt["response"][-1], prompt["data"]) == (10, "<eos>", {})


def test_of_several_stages_one_must_be_named():
    done = show(ROOT / "examples" / "sft_then_grpo_sort.yaml")
    assert isinstance(done.exception, ConfigError)
    assert "stage=sft or stage=grpo" in str(done.exception)
