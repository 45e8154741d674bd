"""From rows to prompts: columns, conversations, tools, pictures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from anytron.base.errors import ConfigError, DataError
from anytron.config.data import SOURCE_OPTIONS, DataSection
from anytron.task.data import Prompt, loading
from anytron.task.data.mixture import load_mixture
from anytron.task.data.sources import SOURCES, load_prompts
from anytron.task.data.vision import read_picture

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number", "default": None}}}}
OTHER_TOOL = {"type": "function", "function": {"name": "now", "parameters": {"zone": {"type": "string"}}}}
ASKED = [{"role": "user", "content": "1+1?"}]


def load(source, path, **options):
    return list(load_prompts(DataSection(source=source, options={"path": str(path), **options})))


def lines(path, *records):
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def write(path, records):
    """The same records as a file of the kind that the path's ending names."""
    if path.suffix == ".jsonl":
        lines(path, *records)
    elif path.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(records), path)
    else:
        datasets.Dataset.from_list(records).save_to_disk(path)
    return path


KINDS = pytest.mark.parametrize(("source", "name"), [("jsonl", "p.jsonl"), ("parquet", "p.parquet"), ("dataset", "p")])


def test_options_are_those_of_sources():
    assert SOURCE_OPTIONS.keys() <= SOURCES.keys()


@KINDS
def test_each_kind_of_file_gives_the_same_prompts(tmp_path, source, name):
    records = [
        {"question": "1>", "meta": {"truth": "1"}, "level": 3, "id": "first"},
        {"question": "2>", "meta": {"truth": "2"}, "level": None, "id": "second"},
    ]
    path = write(tmp_path / name, records)
    columns = {"prompt": "question", "answer": "meta.truth"}
    assert load(source, path, columns=columns) == [
        Prompt("first", text="1>", data={"meta": {"truth": "1"}, "level": 3, "id": "first", "answer": "1"}),
        Prompt("second", text="2>", data={"meta": {"truth": "2"}, "level": None, "id": "second", "answer": "2"}),
    ]


@KINDS
def test_each_kind_of_file_gives_the_same_conversations_and_tools(tmp_path, source, name):
    called = [*ASKED, {"role": "assistant", "tool_calls": [{"id": "7"}]}, {"role": "tool", "content": "2"}]
    records = [
        {"prompt": ASKED, "tools": json.dumps([TOOL])},
        {"prompt": called, "tools": json.dumps([OTHER_TOOL])},
        {"prompt": ASKED, "tools": None},
    ]
    first, second, third = load(source, write(tmp_path / name, records))
    assert (first.messages, first.tools, first.data) == (tuple(ASKED), [TOOL], {}) or source != "jsonl"
    assert [second.messages, third.messages] == [tuple(called), tuple(ASKED)]
    assert [list(one.tools) for one in (second, third)] == [[OTHER_TOOL], []]


def test_arrow_s_nulls_are_no_entries_of_tools_and_messages(tmp_path):
    records = [
        {"prompt": ASKED, "tools": [OTHER_TOOL]},
        {"prompt": [{"role": "user", "content": "2", "name": "x"}], "tools": [{"type": "f", "more": 1}]},
    ]
    first, second = load("parquet", write(tmp_path / "p.parquet", records))
    assert (first.messages, first.tools) == (tuple(ASKED), [OTHER_TOOL])
    assert second.tools == [{"type": "f", "more": 1}]
    (given,) = load("jsonl", lines(tmp_path / "p.jsonl", {"prompt": ASKED, "tools": [TOOL]}))
    assert given.tools == [TOOL], "a null that somebody wrote stays"


def test_a_csv_file_gives_texts(tmp_path):
    (tmp_path / "p.csv").write_text('question,answer,tools,picture\n"1, 2?",007,,\n3?,4,"[{""type"": ""f""}]",a.png\n')
    columns = {"prompt": "question", "images": "picture"}
    first, second = load("csv", tmp_path / "p.csv", columns=columns, chat=True, system="Count.")
    assert first.id == "line 2"
    assert first.messages == ({"role": "system", "content": "Count."}, {"role": "user", "content": "1, 2?"})
    assert (first.data, first.images) == ({"answer": "007"}, ())
    assert (second.tools, second.images) == ([{"type": "f"}], (tmp_path / "a.png",))
    assert second.messages[1]["content"] == [{"type": "image"}, {"type": "text", "text": "3?"}]


def test_a_conversation_keeps_its_own_system_message(tmp_path):
    own = [{"role": "system", "content": "Own."}, *ASKED]
    path = lines(tmp_path / "p.jsonl", {"prompt": own}, {"prompt": ASKED})
    first, second = load("jsonl", path, chat=True, system="Given.")
    assert [one.messages[0]["content"] for one in (first, second)] == ["Own.", "Given."]
    assert load("jsonl", path)[1].messages == tuple(ASKED)


def test_several_files_are_one_source(tmp_path):
    for name in "ba":
        lines(tmp_path / f"{name}.jsonl", {"prompt": f"{name}>"})
    assert [(one.id, one.text) for one in load("jsonl", tmp_path / "*.jsonl")] == [
        ("a.jsonl line 1", "a>"),
        ("b.jsonl line 1", "b>"),
    ]


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        (
            {"question": "?"},
            {},
            r"(?s)no column 'prompt'.*p\.jsonl:1.*its columns are 'question'.*columns`: \{prompt: COLUMN\}",
        ),
        ({"prompts": "?"}, {}, "(?s)no column 'prompt'.*`columns`: {prompt: COLUMN} .did you mean prompts"),
        ({"prompt": "?"}, {"columns": {"answer": "meta.truth"}}, r"(?s)no column 'meta\.truth'.*\{answer: COLUMN\}"),
        ({"prompt": "?", "meta": [1]}, {"columns": {"answer": "meta.0"}}, r"no column 'meta\.0'"),
        ({"prompt": None}, {}, "(?s)neither a string nor a list.*NoneType"),
        ({"prompt": 7}, {"chat": True}, "(?s)neither a string nor a list.*int"),
        ({"prompt": ["a"]}, {}, "neither a string nor a list"),
        ({"prompt": [{"role": "user"}]}, {}, r"(?s)no usable role or content.*:1.*message 1 has .* type NoneType"),
        ({"prompt": [*ASKED, {"role": 1, "content": ""}]}, {}, "(?s)no usable role.*message 2"),
        ({"prompt": [*ASKED, {"role": "user", "content": {"a": 1}}]}, {}, "(?s)no usable role or content.*message 2"),
        ({"prompt": ASKED, "tools": "{oops"}, {}, "(?s)tools of a prompt are not JSON.*:1"),
        ({"prompt": ASKED, "tools": {"a": 1}}, {}, "(?s)tools of a prompt are not a list.*dict"),
        ({"prompt": ASKED, "tools": ["a"]}, {}, "tools of a prompt are not a list"),
        ({"prompt": "?", "tools": [TOOL]}, {}, "tools and no messages"),
        ({"prompt": "?", "images": 5}, {}, "(?s)neither a path nor a picture.*int"),
        ({"prompt": "?", "images": ["a.png", None]}, {}, "neither a path nor a picture"),
        ({"prompt": "?", "images": [{"bytes": None, "path": None}]}, {}, "neither a path nor a picture"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(tmp_path, record, options, message):
    with pytest.raises(DataError, match=message):
        load("jsonl", lines(tmp_path / "p.jsonl", record), **options)


@pytest.mark.parametrize(
    "path",
    ["../secret.png", "/etc/a.png", "sub/../../secret.png", "link/secret.png", "link.png", "a\0.png"],
)
def test_a_path_that_leaves_the_folder_is_refused(tmp_path, path):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    (folder / "link").symlink_to(tmp_path)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    file = lines(folder / "p.jsonl", {"prompt": "?", "images": [path]})
    with pytest.raises(DataError, match=r"(?s)path of an image (leads out of its folder|cannot be used).*p\.jsonl:1"):
        load("jsonl", file)


def test_a_folder_that_holds_all_pictures_allows_them(tmp_path):
    (tmp_path / "data").mkdir()
    file = lines(tmp_path / "data" / "p.jsonl", {"prompt": "?", "images": "data/../a.png"})
    (prompt,) = load("jsonl", file, image_folder=str(tmp_path))
    assert prompt.images == (tmp_path / "data/../a.png",)


def test_pictures_inside_of_hugging_face_s_files(tmp_path):
    noise, buffer = Image.effect_noise((16, 8), 90).convert("RGB"), io.BytesIO()
    noise.save(buffer, "PNG")
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    data = datasets.Dataset.from_dict(
        {"prompt": ["?"], "image": [{"bytes": buffer.getvalue(), "path": None}]}, features
    )
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "p.parquet")
    for source, path in (("dataset", "saved"), ("parquet", "p.parquet")):
        (prompt,) = load(source, tmp_path / path, columns={"images": "image"})
        assert read_picture(prompt.images[0], "p").tobytes() == noise.tobytes()
        assert prompt.data == {}
    with pytest.raises(DataError, match=r"(?s)cannot be read.*prompt p, bytes.*identify"):
        read_picture(b"no picture", "prompt p")


@pytest.fixture
def album(tmp_path):
    for name in ("cat/2.png", "cat/1.JPG", "dog/1.png", "0.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "README.txt").touch()
    return tmp_path


def test_a_folder_of_pictures_asks_the_same_of_each(album):
    prompts = load("images", album, prompt="What is it?", system="Look.")
    assert [(one.id, one.data["label"], one.images) for one in prompts] == [
        ("0.png", "", (album / "0.png",)),
        ("cat/1.JPG", "cat", (album / "cat/1.JPG",)),
        ("cat/2.png", "cat", (album / "cat/2.png",)),
        ("dog/1.png", "dog", (album / "dog/1.png",)),
    ]
    assert prompts[0].messages == (
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
    )
    assert load("images", album, prompt="<image>?", chat=False)[0].text == "<image>?"


def test_a_folder_of_pictures_that_is_none(album, tmp_path_factory):
    (album / "far.png").symlink_to(Path(__file__))
    with pytest.raises(DataError, match=r"(?s)leads out of its folder.*far\.png"):
        load("images", album, prompt="?")
    with pytest.raises(DataError, match="no such folder"):
        load("images", album / "nowhere", prompt="?")
    assert load("images", tmp_path_factory.mktemp("empty"), prompt="?") == []
    lines(album / "metadata.jsonl", {"file_name": "0.png", "question": "?"})
    with pytest.raises(DataError, match=r"(?s)have a metadata file.*metadata\.jsonl.*images: file_name"):
        load("images", album, prompt="?")
    columns = {"prompt": "question", "images": "file_name"}
    assert load("jsonl", album / "metadata.jsonl", columns=columns)[0].images == (album / "0.png",)


@KINDS
def test_a_prompt_without_an_id_is_named_for_its_row(tmp_path, source, name):
    """A column of ids may have holes."""
    path = write(tmp_path / name, [{"prompt": "a", "id": "one"}, {"prompt": "b", "id": None}])
    first, second = load(source, path)
    assert first.id == "one"
    assert second.id.endswith(" 2")


def test_a_dataset_is_refused_where_its_library_is_missing(monkeypatch):
    monkeypatch.setattr(loading, "find_spec", lambda name: None if name == "datasets" else pytest.fail(name))
    section = DataSection(source="dataset", options={"path": "nowhere"})
    with pytest.raises(ConfigError, match="datasets is not installed") as caught:
        load_mixture(
            section, SimpleNamespace(chat_template=None), seed=0, vocab_size=500, context_length=None, max_new_tokens=1
        )
    assert caught.value.where == "data.source = dataset"
    assert "anytron[datasets]" in caught.value.fix
