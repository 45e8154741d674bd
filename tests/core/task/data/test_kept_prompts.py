"""Tokenised prompts of large files are kept, found again, and never taken for the prompts of other files or options."""

from __future__ import annotations

import errno
import json
import os
import time
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from anytron.base.errors import ConfigError, DataError, ResourceError
from anytron.config.data import DataSection, MixedSource
from anytron.config.scoring import RewardSection
from anytron.task.data import columns, kept_prompts, loading, reading
from anytron.task.data.mixture import load_mixture
from anytron.task.data.prompts import Prompt, TokenizedPrompt, tokenize
from anytron.task.data.sources import Share
from anytron.task.rewards.registered import REWARDS
from anytron.task.rewards.scoring import RewardSum

END = "</s>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


def make_tokenizer(template=TEMPLATE):
    words = [END, "user", "assistant", *map(str, range(200))]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=END))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, chat_template=template)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def rows(tmp_path):
    """A file of 40 prompts, of which 40 and more are kept."""
    file = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"{row} {row + 1}", "answer": str(row), "more": [row, None, {"a": 0.5}]} for row in range(40)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "kept" / kept_prompts.OWN_FOLDER


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(kept_prompts, "KEPT_FROM", 40)


@pytest.fixture
def load(tmp_path, rows, tokenizer):
    def loaded(options=None, tokenizer=tokenizer, folder=tmp_path / "kept", **given):
        section = DataSection(
            source="jsonl",
            options={"path": str(rows), "chat": True, **(options or {})},
            cache_dir=None if folder is None else str(folder),
            **given,
        )
        return load_mixture(section, tokenizer, seed=0, vocab_size=500, context_length=None, max_new_tokens=1).tables[0]

    return loaded


@pytest.fixture
def never_read(monkeypatch):
    def refuse():
        def read(*_):
            raise AssertionError("the prompts were read again")

        monkeypatch.setattr(loading, "read_files", read)

    return refuse


def test_a_later_start_finds_equal_prompts_without_reading_the_file(load, never_read):
    first = load()
    never_read()
    later = load()

    assert list(later) == list(first)
    assert later[39] == TokenizedPrompt(
        "line 40",
        "user 39 40 assistant",
        (1, 42, 43, 2),
        {"answer": "39", "more": [39, None, {"a": 0.5}]},
    )
    assert (later.digest, later.lengths) == (first.digest, first.lengths)
    assert load(max_prompt_tokens=4, deduplicate=True).digest == first.digest, "filters do not matter"
    assert isinstance(later.columns.tokens, np.memmap)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"options": {"columns": {"prompt": "prompt", "x": "answer"}}}, id="columns"),
        pytest.param({"options": {"system": "1"}}, id="system message"),
        pytest.param({"tokenizer": make_tokenizer(TEMPLATE + "  1")}, id="template"),
        pytest.param({"chat_template_kwargs": {"x": 1}}, id="arguments of the template"),
        pytest.param({"continue_final_message": True}, id="continued messages"),
    ],
)
def test_whatever_prompts_depend_on_makes_others_of_them(load, never_read, change):
    load()
    never_read()
    with pytest.raises(AssertionError, match="read again"):
        load(**change)


def test_an_edit_is_noticed_that_keeps_size_and_time(load, rows):
    before = rows.stat()
    assert load()[0].data["answer"] == "0"
    rows.write_text(rows.read_text().replace('"answer": "0"', '"answer": "7"'))
    os.utime(rows, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (rows.stat().st_size, rows.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)

    assert load()[0].data["answer"] == "7"


@pytest.mark.parametrize("name", ["tokens", "records", "lengths", kept_prompts.HEADER])
def test_what_is_damaged_is_made_again(load, name, kept, caplog):
    first = list(load())
    (place,) = kept.iterdir()
    with (place / name).open("r+b") as file:
        file.truncate(max(0, (place / name).stat().st_size - 3))

    assert caplog.text == ""
    assert list(load()) == first
    assert "are damaged, so the files are tokenized again" in caplog.text
    assert len(list(kept.iterdir())) == 1
    assert len(kept_prompts.find(kept, place.name)) == 40


def test_a_record_that_is_damaged_inside_is_named_and_the_remedy_helps(load, tmp_path, kept):
    first = list(load())
    (place,) = kept.iterdir()
    with (place / "records").open("r+b") as file:
        file.write(b"\xff" * 8)

    with pytest.raises(DataError, match=r"(?s)prompt 0 \(.*kept/.*delete the folder .*start again") as caught:
        load()[0]
    kept_prompts.remove(Path(caught.value.fix.split("folder ")[1].split(",")[0]))
    assert list(load()) == first


@pytest.mark.parametrize("folder", [None, "kept"])
def test_few_prompts_and_those_of_no_folder_leave_no_files(load, tmp_path, monkeypatch, folder, kept):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(kept_prompts.tempfile, "tempdir", str(temporary))
    if folder:
        monkeypatch.setattr(kept_prompts, "KEPT_FROM", 41)

    table = load(folder=tmp_path / folder if folder else None)

    assert [one.data["answer"] for one in table] == [str(row) for row in range(40)]
    assert not kept.exists()
    assert list(temporary.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_with_two_remedies(load, tmp_path, kept):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"(?s)cannot be kept.*where: .*file/kept.*data\.cache_dir=null"):
        load(folder=tmp_path / "file" / "kept")
    assert len(load(folder=None)) == 40


def test_the_default_is_in_the_user_s_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_prompts.cache_folder("auto") == tmp_path / "anytron-prompts"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert kept_prompts.cache_folder("auto") == Path.home() / ".cache" / "anytron-prompts"
    assert kept_prompts.cache_folder(None) is None


def test_a_start_that_was_slower_takes_what_another_has_written(load, kept, monkeypatch):
    """And deletes nothing of it: the other maps it."""
    real, faster = loading.read_files, []

    def read(*given):
        frames = list(real(*given))
        if not faster:
            faster.append(None)
            faster[:] = load(), next(kept.iterdir()).stat().st_ino
        yield from frames

    monkeypatch.setattr(loading, "read_files", read)
    slower = load()

    (place,) = kept.iterdir()
    assert slower.columns.folder == faster[0].columns.folder == place
    assert place.stat().st_ino == faster[1], "it was replaced"
    assert list(slower) == list(faster[0])


def test_what_cannot_be_published_is_used_and_not_kept(load, kept, monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError("it is another user's")

    first = list(load())
    (place,) = kept.iterdir()
    (place / kept_prompts.HEADER).unlink()
    monkeypatch.setattr(Path, "rename", refuse)
    table = load()

    assert list(table) == first
    assert table.columns.folder is None
    assert "could not be kept" in caplog.text
    assert [path.name for path in kept.iterdir() if path.name.startswith(".part")] == []


def test_a_full_disk_names_the_option(load, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kept_prompts.tempfile, "mkdtemp", full)
    with pytest.raises(ResourceError, match=r"(?s)cannot be kept.*data\.cache_dir"):
        load()


def test_a_template_that_shows_the_time_keeps_nothing(load, kept):
    table = load(tokenizer=make_tokenizer(TEMPLATE + "{{ strftime_now('%d') }}"))
    assert len(table) == 40
    assert not kept.exists()


def test_a_tokenizer_with_a_part_in_python_keeps_nothing(load, kept):
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(object())
    assert kept_prompts.key_of(MixedSource(source="jsonl"), [], tokenizer, {}) == ""


def test_rows_of_other_shares_are_signs_of_life():
    seen = []
    assert list(Share(1, 4, 2, note=lambda: seen.append(None)).of(range(16))) == [2, 3, 10, 11]
    assert len(seen) == 16


def test_what_no_run_has_used_is_deleted(load, tmp_path, kept):
    load()
    (old,) = kept.iterdir()
    part = kept / ".part-of-a-killed-process"
    part.mkdir()
    for path in (old / kept_prompts.HEADER, part):
        os.utime(path, (time.time() - 31 * 86_400,) * 2)
    own = [tmp_path / "kept" / "letters", kept / "letters", kept / ("a" * 40)]
    for path in own[:2]:
        path.mkdir()
        os.utime(path, (0, 0))
    own[2].symlink_to(own[0])
    load(options={"system": "1"})
    assert not old.exists()
    assert not part.exists()
    assert all(path.exists() for path in own), "what is not of this kind stays"
    own[2].unlink()
    own[1].rmdir()

    (recent,) = kept.iterdir()
    os.utime(recent / kept_prompts.HEADER, (time.time() - 31 * 86_400,) * 2)
    load(options={"system": "1"})  # it is used
    load(options={"system": "2"})
    assert recent.exists()


def test_a_file_that_changes_while_it_is_read_is_refused(load, rows, monkeypatch, tmp_path, kept):
    real = loading.read_files

    def read(*given):
        yield from real(*given)
        with rows.open("a") as file:
            file.write("\n")

    monkeypatch.setattr(loading, "read_files", read)
    with pytest.raises(DataError, match=r"(?s)changed while it was read.*rows\.jsonl"):
        load()
    assert list(kept.iterdir()) == []


def test_several_processes_give_the_prompts_of_one_and_its_errors(tokenizer, tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"{row % 200}"}) + "\n" for row in range(100)]
    file.write_text("".join(lines))
    monkeypatch.setattr(reading, "Share", partial(Share, run=7))
    source = MixedSource(source="jsonl", options={"path": str(file)})

    def read(processes):
        function = partial(tokenize, vocab_size=500)
        frames = reading.read_files(source, "data", function, tokenizer, None, processes)
        return [one.prompt(index).text for one in map(columns.encoded, frames) for index in range(len(one))]

    assert read(1) == read(2) == read(3) == [str(row % 200) for row in range(100)]
    file.write_text("".join([*lines[:30], "{oops\n", *lines[31:60], "[]\n"]))
    for processes in (1, 2, 3):
        with pytest.raises(DataError, match=r"rows\.jsonl:31"):
            read(processes)


def test_a_registered_reward_checks_kept_prompts_once(load, monkeypatch):
    checked = []
    monkeypatch.setattr(REWARDS["exact_match"], "check_prompt", lambda self, data: checked.append(data))

    def check(**options):
        checked.clear()
        RewardSum.from_config([RewardSection(function="exact_match", options=options)]).check([load(**filters)])
        return len(checked)

    filters = {}
    assert [check(), check(), check(key="more"), check(key="more")] == [40, 0, 40, 0]
    filters = {"max_prompt_tokens": 4}
    assert check() == 0, "the same prompts are left"


def test_prompts_that_a_reward_refuses_are_refused_at_each_start(load):
    rewards = RewardSum.from_config([RewardSection(function="exact_match", options={"key": "none"})])
    for _ in range(2):
        with pytest.raises(DataError, match="39 other bad prompts"):
            rewards.check([load()])


DATA = st.dictionaries(
    st.text(max_size=5),
    st.one_of(st.none(), st.text(), st.integers(), st.booleans(), st.binary(), st.dates(), st.lists(st.integers())),
    max_size=3,
)


@given(st.lists(st.tuples(st.text(), st.lists(st.integers(0, 2**31 - 1), min_size=1), DATA), max_size=9), st.booleans())
def test_encoded_columns_and_those_in_memory_hold_the_same_prompts(given_prompts, masked):
    masks = [tuple(one % 2 == 0 for one in tokens) if masked else None for _, tokens, _ in given_prompts]
    prompts = [
        TokenizedPrompt(str(n), text, tuple(tokens), data, response_mask=mask)
        for n, ((text, tokens, data), mask) in enumerate(zip(given_prompts, masks, strict=True))
    ]
    held = columns.in_memory(prompts)
    encoded = columns.encoded(columns.arrays_of(columns.frame_of(prompts, pictures=False)))

    assert [held.prompt(index) for index in range(len(held))] == prompts
    assert [encoded.prompt(index) for index in range(len(encoded))] == prompts
    assert held.digests.tobytes() == encoded.digests.tobytes()


@pytest.mark.parametrize("name", columns.COLUMNS)
def test_columns_that_do_not_belong_together_are_refused(name):
    frame = columns.frame_of([TokenizedPrompt("1", "a", (1, 2), {}, response_mask=(False, True))] * 3, pictures=False)
    size = np.dtype(columns.COLUMNS[name]).itemsize
    for wrong in (frame[name][size:], frame[name] + bytes(size), None):
        with pytest.raises(ValueError, match=r"contradict each other|the columns of prompts"):
            columns.arrays_of({**frame, name: wrong})


def test_a_negative_length_is_refused():
    frame = columns.frame_of([TokenizedPrompt(str(n), "a", (1, 2), {}) for n in range(2)], pictures=False)
    frame["lengths"] = np.array([5, -1], "<i4").tobytes()
    with pytest.raises(ValueError, match="negative"):
        columns.arrays_of(frame)


def test_conversations_are_rendered_together_and_a_refused_one_is_named():
    refuse = "{% if messages[0].content == '3' %}{{ raise_exception('no three') }}{% endif %}"
    tokenizer = make_tokenizer(refuse + "{{ messages[0].content }}")

    def read(*contents):
        prompts = [Prompt(f"p{one}", messages=[{"role": "user", "content": one}]) for one in contents]
        return [one.text for one in tokenize(prompts, tokenizer, vocab_size=500)]

    assert read("1", "2") == ["1", "2"]
    with pytest.raises(DataError, match=r"(?s)refuses a prompt's messages.*prompt p3.*no three"):
        read("1", "3", "2")


def test_plain_data_come_back_as_they_were(load):
    special = {"day": date(2026, 1, 2), "number": Decimal("1.50"), "bytes": b"\0\xff", "path": Path("/a")}
    prompts = [TokenizedPrompt("1", "a", (1,), special)]
    (found,) = columns.encoded(columns.arrays_of(columns.frame_of(prompts, pictures=False))).records
    assert found[2] == special
