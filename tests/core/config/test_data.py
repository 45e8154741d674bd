"""The section ``data``: one source or a mix, and options of registered sources that are checked where they stand."""

from __future__ import annotations

import json

import pytest

from anytron.base.errors import ConfigError
from anytron.config.load import load_config
from anytron.run.preflight.files import _needed, reference_diagnostics

FILE = """\
model: {config: {model_type: qwen3}, tokenizer: task.py:tokenizer}
data: DATA
rewards: [{function: exact_match}]
"""


@pytest.fixture
def read(tmp_path):
    def load(data, *overrides):
        (tmp_path / "run.yaml").write_text(FILE.replace("DATA", json.dumps(data)))
        return load_config(tmp_path / "run.yaml", overrides)

    return load


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, r"exactly one of data\.source and data\.mix"),
        ({"source": "jsonl", "mix": [{"source": "csv"}]}, "exactly one"),
        ({"mix": [{"source": "a:f"}], "options": {"n": 1}}, r"data\.options are the options of data\.source"),
        (
            {"mix": [{"source": "a:f", "weight": 1}, {"source": "b:f"}]},
            "a weight to every source of data.mix, or to no source",
        ),
        ({"mix": [{"source": "a:f"}, {"source": "a:f"}]}, "same name, a:f: set a different name for each"),
        ({"mix": [{"source": "a:f", "weight": 0}]}, r"data\.mix\.0\.weight.*greater than 0"),
        ({"mix": [{"source": "a:f", "wieght": 1}]}, r"did you mean data\.mix\.0\.weight"),
        ({"mix": 3}, r"data\.mix"),
        ({"source": ["jsonl"], "options": {}}, r"data\.source"),
        ({"source": "jsonl"}, r"data\.options\.path.*required"),
        ({"source": "jsonl", "options": {"path": "a", "prompt_key": "q"}}, "unknown key 'prompt_key'.*columns"),
        ({"source": "csv", "options": {"path": 3}}, r"data\.options\.path"),
        ({"source": "parquet", "options": {"path": "a", "columns": {"prompt": 1}}}, r"columns\.prompt"),
        ({"source": "jsonl", "options": {"path": "a", "system": "s"}}, "needs chat=true"),
        ({"source": "jsonl", "options": {"path": "a", "split": "train"}}, "unknown key 'split'"),
        ({"source": "images", "options": {"path": "a"}}, r"data\.options\.prompt.*required"),
        (
            {"mix": [{"source": "csv", "options": {"path": "a", "colums": {}}}]},
            r"did you mean data\.mix\.0\.options\.columns",
        ),
        ({"source": "a:f", "chat_template_kwargs": {"tokenize": True}}, "Anytron itself sets tokenize: remove it"),
        ({"source": "a:f", "max_prompt_tokens": 0}, r"data\.max_prompt_tokens"),
    ],
)
def test_a_mistake_is_found_when_the_file_is_read(read, data, message):
    with pytest.raises(ConfigError, match=f"(?s){message}") as caught:
        read(data)
    assert "run.yaml:2" in str(caught.value)


def test_paths_of_each_source_of_a_mix_are_relative_to_the_file(read, tmp_path):
    mix = [
        {"source": "parquet", "options": {"path": "data/*.parquet", "image_folder": "pictures"}},
        {"source": "task.py:prompts", "options": {"path": "own"}, "name": "mine"},
    ]
    config = read({"mix": mix})
    first, second = config.data.mix
    here = tmp_path.resolve()
    assert first.options == {"path": f"{here}/data/*.parquet", "image_folder": f"{here}/pictures"}
    assert (second.source, second.options) == (f"{here}/task.py:prompts", {"path": "own"})
    assert [one.title for one in config.data.keyed_sources().values()] == ["*.parquet", "mine"]
    assert list(config.data.keyed_sources()) == ["data.mix.0", "data.mix.1"]
    needed = _needed(config, tmp_path / "run.yaml")
    assert needed["data.mix.0.options.image_folder"] == here / "pictures"
    assert needed["data.mix.1.source"] == here / "task.py"
    keys = {one.key for one in reference_diagnostics(config)}
    assert keys >= {"data.mix.1.source"}


def test_a_mix_may_be_replaced_by_a_source_on_the_command_line(read):
    config = read({"mix": [{"source": "a:f"}]}, "data.mix=[]", "data.source=b:f")
    assert [(key, one.title) for key, one in config.data.keyed_sources().items()] == [("data", "b:f")]
