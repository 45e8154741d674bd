"""JSON that somebody else has written, and files that cannot be opened: both are said for what they are."""

from __future__ import annotations

import contextlib
import os
import resource

import pytest
from safetensors import safe_open

from anytron.base.errors import AnytronError, ResourceError
from anytron.config.json_files import WITH_CONFIGURATION, parse_json, parse_object, read_bytes, read_object
from anytron.config.load import load_config
from anytron.record.checkpoint.directory import Best
from anytron.record.checkpoint.manifest import DriverState, Manifest
from anytron.record.tracking.record import RunRecord
from anytron.run.trainer.non_finite import read_bad_batch
from anytron.task.data import model_files
from anytron.task.data.composites import TensorNames
from anytron.task.data.rows import jsonl_rows, parquet_rows
from anytron.task.data.vision import read_picture
from anytron.task.data.weight_headers import read_header
from anytron_megatron.checkpoint.progress import Progress
from anytron_megatron.lora.peft_directory import require_same_tensors
from anytron_megatron.models import loading

MALFORMED = {
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep and whole": b'{"a":' * 100 + b"1" + b"}" * 100,
    "a list": b"[1]",
    "null": b"null",
    "a number": b"1",
    "digits": b'{"format": ' + b"9" * 5000 + b"}",
    "nothing": b"",
    "half": b'{"format": 1',
    "not UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "binary": bytes(range(256)),
}
READERS = {
    "manifest.json": Manifest.read,
    "driver.json": DriverState.read,
    "best": Best.read,
    "run.json": RunRecord.read,
    "config.json": model_files.read_config,
    "batch.json": read_bad_batch,
    "progress.json": Progress.read,
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_what_is_malformed_is_a_value_error_with_words(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"^it is "):
        read_object(tmp_path / "x.json")


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("name", READERS)
def test_every_reader_says_it_with_the_name_of_the_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(AnytronError) as raised:
        READERS[name](tmp_path)
    assert str(tmp_path) in raised.value.where
    assert raised.value.why


def test_a_file_that_is_too_large_is_not_read_to_its_end(tmp_path):
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        read_bytes(tmp_path / "x.json", 1000)
    (tmp_path / "x.json").rename(tmp_path / "manifest.json")
    with pytest.raises(AnytronError, match="bytes"):
        Manifest.read(tmp_path)


def test_a_pipe_and_a_folder_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "nothing"):
        with pytest.raises(FileNotFoundError):
            read_bytes(tmp_path / name)


def test_what_is_well_formed_is_read():
    assert parse_object('{"a": [1, "\u00e4"]}') == {"a": [1, "\u00e4"]}
    nested = "[" * WITH_CONFIGURATION + "]" * WITH_CONFIGURATION
    parse_json(nested, deepest=WITH_CONFIGURATION)
    with pytest.raises(ValueError, match="levels"):
        parse_json(nested)


# ---- files that are there, and cannot be opened ---------------------------------------------------------


OPENS = {
    "JSON": read_object,
    "a configuration": load_config,
    "JSON of a model": model_files.read_object,
    "a header": read_header,
    "an adapter": lambda path: require_same_tensors(path.parent, {}),
    "a manifest": lambda path: Manifest.read(path.parent),
    "a run": lambda path: RunRecord.read(path.parent),
    "a mini-batch": lambda path: read_bad_batch(path.parent),
    "progress": lambda path: Progress.read(path.parent),
    "prompts": lambda path: list(jsonl_rows(path)),
    "Parquet": lambda path: list(parquet_rows(path)),
    "a picture": lambda path: read_picture(path, "row 1"),
}
FILES = ("manifest.json", "run.json", "batch.json", "progress.json", "adapter_model.safetensors", "x")


@pytest.fixture
def files(tmp_path):
    for name in FILES:
        (tmp_path / name).write_text("{}")
    return tmp_path / "x"


@pytest.fixture
def no_descriptors():
    """Open files until none can be opened any more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    read_warm()
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    held = []
    with contextlib.suppress(OSError):
        while len(held) < limits[0]:
            held.append(os.open("/dev/null", os.O_RDONLY))
    yield
    for descriptor in held:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def read_warm():
    """What is imported at first use is imported before descriptors run out."""
    import PIL.Image  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import safetensors  # noqa: F401


@pytest.mark.parametrize("kind", OPENS)
def test_that_no_file_can_be_opened_is_not_that_one_is_missing(files, no_descriptors, kind):
    with pytest.raises(ResourceError) as raised:
        OPENS[kind](files)
    assert raised.value.what == "This process has no file descriptors left."
    assert raised.value.fix == "raise the limit in the shell that starts Anytron: ulimit -n 4096"


def test_weights_that_cannot_be_opened_do_not_lack_tensors(files, no_descriptors, monkeypatch):
    class Bridge:
        @staticmethod
        def load_weights(chunks, directory, converter):
            with safe_open(files, "pt"):
                pytest.fail("it can be opened")

    monkeypatch.setattr(loading, "_everywhere", lambda value: [value])  # one rank
    with pytest.raises(ResourceError, match="no file descriptors left"):
        loading.load_weights(Bridge(), [], files.parent, 1, TensorNames())
