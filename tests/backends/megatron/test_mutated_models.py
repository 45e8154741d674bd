"""Mutations of a sound model directory, drawn from a seed: each is refused in words, or trains.

The directory is the policy's, the critic's, a teacher's, or an adapter's. The first few of each run always, all of them
as ``slow``. Each runs in a process of its own, as the command line would read it: its time of the processor, its memory
beyond that of this process, and all that it writes are looked at.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from anytron.base.errors import AnytronError
from anytron.cli import main
from anytron.task.isolation import reader
from tests.backends.megatron.test_malformed_models import CONFIG, GENERATION, INDEX, WEIGHTS, sound, start

__all__ = ("sound",)
"""A fixture."""

MUTATIONS = {"model": 160, "critic": 40, "teacher": 40, "adapter": 60}
"""Of the directory with that name beside the run's file."""
ALWAYS = {"model": 8, "critic": 2, "teacher": 2, "adapter": 4}
GIVEN = {
    "model": (),
    "critic": ("critic.path=critic", "algorithm.advantage=gae"),
    "teacher": ("teacher.path=teacher", "algorithm.distillation_coefficient=0.5"),
    "adapter": ("model.lora={path: adapter, rank: 2, alpha: 4}",),
}
"""What the run says of it."""
ADAPTER, OF_ADAPTER = "adapter_config.json", "adapter_model.safetensors"
LARGEST = 1 << 30
"""Bytes beyond what the process had when it began."""
SECONDS = 10
ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
TOKENIZER, OF_TOKENIZER, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
JSON_FILES = (CONFIG, TOKENIZER, TOKENIZER, TOKENIZER, OF_TOKENIZER, GENERATION)
"""A file that more of the loading depends on is drawn more often."""
VALUES = (
    None, True, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 1e308, float("nan"), float("inf"), 0.5, "", "a", ESCAPE,
    ESCAPE * 2000, "\0", "../../../etc/passwd", "/dev/zero", "\ud800", "a" * 10**6, [], {}, [[]] * 1000, {"": None},
    {ESCAPE: ESCAPE}, [ESCAPE], ["a"] * 10**5, {str(number): number for number in range(10**5)},
)  # fmt: skip
DOUBLING = {"type": "Replace", "pattern": {"String": "1"}, "content": "11"}
SLOW = {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": ""}
PARTS = (
    {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 40}},
    {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 20 + [SLOW]}},
    {"normalizer": {"type": "Prepend", "prepend": "1" * 10**6}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"decoder": {"type": "Sequence", "decoders": [DOUBLING] * 40}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "((a?){50}){50}"}, "behavior": "Isolated"}},
    {"pre_tokenizer": {"type": "Metaspace", "replacement": "ab"}},
    {"post_processor": {"type": "BertProcessing", "sep": ["x", 2**32 - 1], "cls": ["y", 2**32 - 1]}},
    {"truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 10}},
    {"padding": {
        "strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "",
    }},
    {"added_tokens": [{"id": 2**32 - 1, "content": ESCAPE, "special": True}]},
    {"model": {"type": "BPE", "vocab": {"a": 0, "b": 2**32 - 1}, "merges": [["a", "c"]]}},
    {"model": {"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0]]}},
    {"model": {"type": "WordPiece", "unk_token": "", "continuing_subword_prefix": "", "vocab": {"": 0}}},
)  # fmt: skip
TEMPLATES = (
    "{{ '%1000000000d' % 5 }}", "{{ 'a'|center(3000000000) }}", "{{ 'a\n'|indent(2000000000) }}", "{{ 9**9**9 }}",
    "{% for a in range(10**9) %}{% for b in range(10**9) %}{% endfor %}{% endfor %}", "{{ messages * 10**9 }}",
    "{{ raise_exception('" + ESCAPE + "') }}", "{{ ''.__class__.__mro__ }}", "{% include '/etc/passwd' %}", "{{",
    "{{ namespace(a=namespace) }}" * 10**5, "{{ (" * 5000, ESCAPE, "{{ 'a' * 10**10 }}", "{{ messages|tojson|upper }}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", "{{ '\\ud800' }}", "", "\0",
)  # fmt: skip


def drawn(seed, role="model"):
    """A mutation: what it is called, and a function of the directory."""
    chance = random.Random(seed)
    if role == "adapter":
        kinds = (partial(field, names=(ADAPTER,)), partial(spoilt, names=(ADAPTER, OF_ADAPTER)))
        return chance.choice((*kinds, kinds[0], partial(weights, name=OF_ADAPTER), index))(chance)
    kind = chance.choice((field, field, field, field, part, part, template, template, spoilt, weights, index, special))
    return kind(chance)


def places(value, path=()):
    """All places in a JSON value, each drawn with the same chance whatever it holds: no more than 64 below each."""
    yield path
    if isinstance(value, (dict, list)):
        inner = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, one in inner[:64]:
            yield from places(one, (*path, key))


def read(file):
    return json.loads(file.read_text()) if file.exists() else {}


def field(chance, names=JSON_FILES):
    """A field of a JSON file gets a value, or goes, or comes."""
    name, position, value = chance.choice(names), chance.random(), chance.choice(VALUES)
    deed = chance.choice(("set", "set", "set", "remove", "add"))

    def change(model):
        whole = read(model / name)
        found = list(places(whole))
        path = found[int(position * len(found))]
        if not path:
            whole = value
        else:
            inside = whole
            for key in path[:-1]:
                inside = inside[key]
            if deed == "remove":
                del inside[path[-1]]
            elif deed == "add" and isinstance(inside, dict):
                inside[ESCAPE] = value
            else:
                inside[path[-1]] = value
        (model / name).write_text(json.dumps(whole))

    return f"{name}: {deed} {str(value)[:20]!a}", change


def part(chance):
    """A part of the tokenizer is another."""
    new = chance.choice(PARTS)

    def change(model):
        (model / TOKENIZER).write_text(json.dumps({**read(model / TOKENIZER), **new}))

    return f"{TOKENIZER}: {json.dumps(new)[:40]}", change


def template(chance):
    """There is a chat template, and prompts that want it."""
    text = chance.choice(TEMPLATES)

    def change(model):
        (model / TEMPLATE).write_bytes(text.encode(errors="surrogatepass"))
        rows = [{"prompt": [{"role": "user", "content": "3 1 2"}], "answer": "123"}] * 4
        (model.parent / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        run = model.parent / "run.yaml"
        run.write_text(re.sub(r"source: .*?}", "source: jsonl, options: {path: rows.jsonl}", run.read_text(), count=1))

    return f"{TEMPLATE}: {text[:30]!a}", change


def spoilt(chance, names=(CONFIG, TOKENIZER, OF_TOKENIZER, WEIGHTS, INDEX)):
    """Bytes of a file are others, or it ends early, or it is no file."""
    name = chance.choice(names)
    deed, position, byte = chance.choice(("flip", "cut", "link", "loop", "pipe", "folder")), chance.random(), 0xFF

    def change(model):
        file = model / name
        data = bytearray(file.read_bytes() if file.exists() else b"{}")
        if deed == "flip":
            for step in range(8):
                data[int(position * len(data) + step * 97) % len(data)] ^= byte
            file.write_bytes(data)
            return
        file.unlink(missing_ok=True)
        if deed == "cut":
            file.write_bytes(data[: int(position * len(data))])
        elif deed == "pipe":
            os.mkfifo(file)
        elif deed == "folder":
            file.mkdir()
        else:
            file.symlink_to("/dev/zero" if deed == "link" else name)

    return f"{name}: {deed}", change


def weights(chance, name=WEIGHTS):
    """The header of the weights says something else."""
    key, value, position = (
        chance.choice(("shape", "dtype", "data_offsets", ESCAPE)),
        chance.choice(VALUES),
        chance.random(),
    )

    def change(model):
        data = (model / name).read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        entries = json.loads(data[8 : 8 + length])
        tensor = sorted(entries)[int(position * len(entries))]
        entries[tensor] = {**entries[tensor], key: value}
        header = json.dumps({ESCAPE + one if key == ESCAPE else one: entry for one, entry in entries.items()}).encode()
        (model / name).write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])

    return f"{name}: {key!a} {str(value)[:20]!a}", change


def index(chance):
    """There is an index over the weights, with a hostile file or tensor."""
    value = chance.choice(VALUES)

    def change(model):
        (model / INDEX).write_text(json.dumps({"weight_map": {ESCAPE: WEIGHTS, "lm_head.weight": value}}))

    return f"{INDEX}: {str(value)[:20]!a}", change


def special(chance):
    """Special tokens are other values."""
    name, value = chance.choice(("eos_token", "pad_token", "bos_token", "extra_special_tokens")), chance.choice(VALUES)

    def change(model):
        for file in (OF_TOKENIZER, SPECIAL):
            (model / file).write_text(json.dumps({**read(model / file), name: value}))

    return f"special tokens: {name} {str(value)[:20]!a}", change


class Outcome:
    """What a process did that began a run: its status, what it wrote, and what it took."""

    def __init__(self, folder, given):
        said = folder / "said"
        pid = os.fork()
        if pid == 0:
            begin(folder, said, given)
        before = resident(pid)
        _, status, used = os.wait4(pid, 0)
        self.status = os.waitstatus_to_exitcode(status)
        self.seconds = used.ru_utime + used.ru_stime
        self.memory = used.ru_maxrss * 1024 - before
        self.text = said.read_bytes().decode("utf-8", "backslashreplace")


def resident(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def begin(folder, said, given):
    """Read all that a run reads before its first worker, and show the first prompts."""
    status = 70
    with suppress(BaseException):
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        signal.alarm(120)  # a machine on which others compute; processor time is what is measured
        sys.argv = ["anytron", "data", "show", str(folder / "run.yaml"), f"trainer.output_dir={folder / 'run'}"]
        try:
            start(folder, given)
            main.run()
            status = 0
        except AnytronError as error:
            main.print_error(error)
            status = 1
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:  # noqa: BLE001 - a library's panic is none of the narrower kinds
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def with_others(folder):
    """Put the critic, the teacher and the adapter beside the policy."""
    for role in ("critic", "teacher"):
        shutil.copytree(folder / "model", folder / role)
    (folder / "adapter").mkdir()
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "use_rslora": False}
    (folder / "adapter" / ADAPTER).write_text(json.dumps(fields))
    sides = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    save_file(sides, folder / "adapter" / OF_ADAPTER)


CHOSEN = [
    pytest.param(
        role, seed, marks=[] if seed < ALWAYS[role] else pytest.mark.slow, id=f"{role}-{seed}-{drawn(seed, role)[0]}"
    )
    for role, count in MUTATIONS.items()
    for seed in range(count)
]


@pytest.mark.some(1)
@pytest.mark.timeout(150)
@pytest.mark.parametrize("role", ["critic", "teacher", "adapter"])
def test_directories_beside_the_policys_are_sound(sound, tmp_path, role):
    folder = shutil.copytree(sound, tmp_path / "copy")
    with_others(folder)
    outcome = Outcome(folder, GIVEN[role])
    assert outcome.status == 0, outcome.text[-3000:]


@pytest.mark.some(2)
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("role", "seed"), CHOSEN)
def test_a_mutated_directory_is_refused_in_words_or_trains(sound, tmp_path, monkeypatch, role, seed):
    monkeypatch.setattr(reader, "COMPUTE_S", 2.0)
    folder = shutil.copytree(sound, tmp_path / "copy")
    with_others(folder)
    drawn(seed, role)[1](folder / role)
    outcome = Outcome(folder, GIVEN[role])
    assert outcome.status in {0, 1}, outcome.text[-3000:]
    assert "Traceback" not in outcome.text
    assert CONTROL.findall(outcome.text) == []
    assert outcome.status == 0 or "error: " in outcome.text
    assert outcome.memory < LARGEST, outcome.text[-3000:]
    assert outcome.seconds < SECONDS, outcome.text[-3000:]
