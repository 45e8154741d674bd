"""Prompts are read in a confined process: what their files and templates do there is an error in words."""

from __future__ import annotations

import json
import resource
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anytron.base.errors import AnytronError, DataError
from anytron.config.data import DataSection
from anytron.config.imports import resolve
from anytron.task.data.columns import encoded
from anytron.task.data.pretrained import TOKENIZER
from anytron.task.data.prompts import Prompt, tokenize
from anytron.task.data.reading import PromptReader, read_files
from anytron.task.isolation import reader

EXAMPLES = Path(__file__).parents[4] / "examples"
MIB = 1 << 20
BOMBS = {
    "a number of a gigabyte": ("{{ '%1000000000d' % 5 }}", r"more memory than|without progress"),
    "three gigabytes of blanks": ("{{ 'a'|center(3000000000) }}", r"more memory than|without progress"),
    "two gigabytes of indentation": ("{{ 'a\nb'|indent(2000000000) }}", r"more memory than|without progress"),
    "a power without end": ("{{ 9 ** (9 ** 9) }}", "without progress"),
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(reader, "COMPUTE_S", 1.0)


@pytest.fixture(scope="module")
def tokenizer():
    return resolve(f"{EXAMPLES}/characters.py:tokenizer", TOKENIZER)()


def read(source, tokenizer, **options):
    section = DataSection(source=source, options=options, prompts_per_step=1)
    frames = read_files(section, "data", partial(tokenize, vocab_size=1000), tokenizer, None)
    return [columns.prompt(index) for columns in map(encoded, frames) for index in range(len(columns))]


@pytest.fixture
def bomb(tmp_path):
    """A Parquet file of a few kilobytes, whose 60 rows have 50 MB each."""
    long = pa.array(["a" * (50 * MIB)])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 60, pa.int32()), long)
    file = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"prompt": column}), file, compression="zstd", store_schema=False)
    assert file.stat().st_size < 20_000
    return file


@pytest.mark.slow
def test_a_table_of_gigabytes_in_a_few_kilobytes_is_refused(bomb, tokenizer):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="the reading process") as caught:
        read("parquet", tokenizer, path=str(bomb))
    error = caught.value
    assert all((error.what, error.where, error.why, error.fix))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB, of this process


@pytest.mark.parametrize(("template", "why"), BOMBS.values(), ids=BOMBS)
def test_a_template_that_takes_gigabytes_in_one_call_is_refused(tmp_path, tokenizer, monkeypatch, template, why):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": "a"}]}))
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(AnytronError, match=why) as caught:
        read("jsonl", tokenizer, path=str(file))
    assert all((caught.value.what, caught.value.where, caught.value.why, caught.value.fix))


def test_rows_come_back_with_all_that_rewards_need(tmp_path, tokenizer):
    """600 rows are several messages."""
    table = pa.table({"prompt": [f"a {number}" for number in range(600)], "answer": list(range(600))})
    pq.write_table(table, tmp_path / "sound.parquet")
    found = read("parquet", tokenizer, path=str(tmp_path / "sound.parquet"))
    assert [(one.text, one.data["answer"]) for one in found] == [(f"a {number}", number) for number in range(600)]
    assert [tokenizer.decode(list(one.tokens)) for one in found[:3]] == ["a 0", "a 1", "a 2"]


def test_prompts_that_come_one_after_another_are_read_in_the_process_too(tokenizer, monkeypatch):
    """An error ends the process; the next prompts have another one."""
    monkeypatch.setattr(tokenizer, "chat_template", BOMBS["two gigabytes of indentation"][0])
    one_by_one = PromptReader(partial(tokenize, vocab_size=1000), tokenizer)
    try:
        for _ in range(2):
            with pytest.raises(DataError, match=BOMBS["two gigabytes of indentation"][1]):
                one_by_one.read([Prompt("1", messages=[{"role": "user", "content": "a"}])])
            first, second = one_by_one.read([Prompt("2", text="b"), Prompt("3", text="a c", data={"answer": 1})])
            assert [first.tokens, second.tokens] == [tuple(tokenizer(one)["input_ids"]) for one in ("b", "a c")]
            assert second.data == {"answer": 1}
    finally:
        one_by_one.close()
