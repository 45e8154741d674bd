"""What a report takes of a run: samples, settings, workers, plots."""

from __future__ import annotations

import io
import json
import tempfile
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from anytron.base.terminal import visible
from anytron.cli.watch import BLOCKS, PLAIN, plot
from anytron.record.report.chapters import chapters, descriptions
from anytron.record.report.page import embed_pictures, short_names
from anytron.record.report.run import Run
from anytron.record.report.samples import SampleFile, choose_samples, last_samples
from anytron.record.report.settings import HIDDEN, compared, describe_workers, devices, settings, shortened
from tests.core.record.report.runs import HOSTILE, make_run, sample


def steps_in_order(path):
    """The steps of a run's samples by importance, one for each group of samples."""
    with (path / "samples.jsonl").open("rb") as file:
        return [found[0][1]["step"] for found in SampleFile(file).by_importance() if found]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 200)), max_size=40), st.booleans())
def test_every_step_has_its_turn_once_with_all_its_samples_and_the_ends_come_first(groups, cut_short):
    """Of each step a number of samples, and their length; between them lines that cannot be read."""
    with tempfile.TemporaryDirectory() as folder:
        path, wanted = Path(folder, "samples.jsonl"), []
        with path.open("w") as file:
            for step, (count, length) in enumerate(groups):
                for number in range(count):
                    wanted.append((file.tell(), sample(step, number, response="x" * length)))
                    file.write(json.dumps(wanted[-1][1]) + "\n" + "no sample\n" * (length % 7 == 0))
            file.write('{"step": 9, "pro' * cut_short)
        with path.open("rb") as file:
            found = SampleFile(file)
            in_turn = [one for one in found.by_importance() if one]
    assert sorted(chain.from_iterable(in_turn), key=itemgetter(0)) == wanted
    order = [one[0][1]["step"] for one in in_turn]
    assert len(order) == len(groups)
    assert set(order[:10]) == {*range(min(5, len(order))), *range(max(len(order) - 5, 0), len(order))}
    assert len(found.broken) == sum(count for count, length in groups if length % 7 == 0)
    assert found.cut_short == cut_short


def test_those_in_between_are_spread(tmp_path):
    path = make_run(tmp_path / "run", 1000)
    chosen = sorted(steps_in_order(path)[10:25])
    gaps = [after - before for before, after in pairwise([5, *chosen, 996])]
    assert max(gaps) <= 2 * min(gaps)


def test_of_many_samples_few_are_read(tmp_path):
    path = make_run(tmp_path / "run", 1000)
    read = []

    class Counted(io.BytesIO):
        def readline(self):
            read.append(super().readline())
            return read[-1]

    found = SampleFile(Counted((path / "samples.jsonl").read_bytes())).by_importance()
    steps = [next(found)[0][1]["step"] for _ in range(14)]
    assert (steps[:4], len(set(steps))) == ([1, 1000, 2, 999], 14)
    assert len(read) < 100, "of 4000"


def test_samples_of_both_ends_fit_into_little_room(tmp_path):
    path = make_run(tmp_path / "run")
    run, size = Run(path), (path / "samples.jsonl").stat().st_size
    everything = choose_samples(run, 1 << 20)
    assert (len(everything["samples"]), everything["logged_bytes"], everything["left_out"]) == (120, size, False)
    little = choose_samples(run, 2500)
    assert len(json.dumps(little["samples"])) < 2600
    assert {one["step"] for one in little["samples"]} >= {1, 30}
    assert (little["logged_bytes"], little["left_out"]) == (size, True)
    assert [one["step"] for one in little["samples"]] == sorted(one["step"] for one in little["samples"])


def test_a_sample_is_given_however_long_it_is(tmp_path):
    long = sample(1, prompt="x" * 100_000, response="y" * 99_999 + "the end")
    run = Run(make_run(tmp_path / "run", 1, samples_of=lambda step: [long]))
    (only,) = choose_samples(run, 10)["samples"]
    assert "88,000 characters are left out" in only["prompt"]
    assert only["response"].endswith("the end")
    assert len(only["response"]) < 12_100


@pytest.mark.parametrize("value", [None, True, -1, 10**400, float("nan"), "x" * 99_999, [[1]], {"a": {}}], ids=range(8))
@pytest.mark.parametrize(
    "key", ["prompt", "response", "prompt_id", "reward", "images", "turns", "reward_errors", "finished", "step"]
)
def test_whatever_stands_in_a_sample(tmp_path, key, value):
    run = Run(make_run(tmp_path / "run", 2, samples_of=lambda step: [{**sample(step), key: value}, sample(step)]))
    found = choose_samples(run, 1 << 20)
    json.dumps(found, allow_nan=False)
    assert len(found["samples"]) in (2, 4)
    assert all(isinstance(one[text], str) for one in found["samples"] for text in ("prompt", "response", "id"))


def test_the_last_samples(tmp_path):
    path = make_run(tmp_path / "run", samples_of=lambda step: [sample(step, 1, response="z" * 200_000)])
    assert [one["step"] for one in last_samples(Run(path), 3)] == [28, 29, 30]
    with (path / "samples.jsonl").open("a") as file:
        file.write('{"step": 31, "pro')
    assert [one["step"] for one in last_samples(Run(path), 2)] == [29, 30]
    (path / "samples.jsonl").unlink()
    assert last_samples(Run(path), 3) == []


def test_pictures_are_small_and_of_the_run(tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (512, 300), "red").save(tmp_path / "images" / "00001-0.png")
    (tmp_path / "images" / "00001-1.png").write_text("no picture")
    (tmp_path / "images" / "00001-2.png").symlink_to(tmp_path / "images" / "00001-0.png")
    names = [f"images/00001-{number}.png" for number in range(4)]
    found = embed_pictures(tmp_path, names, 100_000)
    assert found.keys() == {names[0]}
    assert found[names[0]].startswith("data:image/jpeg;base64,")
    assert len(found[names[0]]) < 5000
    assert embed_pictures(tmp_path, names, 100) == {}


def test_a_picture_elsewhere_is_not_named(tmp_path):
    images = ["images/00001-0.png", "../secret.png", "images/../../x-1.png", "/etc/1-1.png", 3]
    run = Run(make_run(tmp_path / "run", 1, samples_of=lambda step: [sample(step, images=images)]))
    assert choose_samples(run, 9999)["samples"][0]["images"] == ["images/00001-0.png"]


def test_secrets_are_hidden():
    config = {
        "environment": {
            "options": {"api_key": "sk-1", "TOKEN": "t", "url": "https://me:word@host/x", "hf_token": None}
        },
        "rollout": {"max_new_tokens": 5},
        "model": {"tokenizer": "t", "config": {"eos_token_id": 3}},
    }
    assert settings(config) == {
        "environment.options.api_key": HIDDEN,
        "environment.options.TOKEN": HIDDEN,
        "environment.options.url": '"https://host/x"',
        "environment.options.hf_token": "null",
        "rollout.max_new_tokens": "5",
        "model.tokenizer": '"t"',
        "model.config.eos_token_id": "3",
    }


def test_configurations_stand_beside_each_other():
    one, other = {"a": {"b": 1, "c": []}}, {"a": {"b": 2, "d": [{"e": "x"}]}}
    assert compared([one, other]) == [
        ("a.b", ["1", "2"]),
        ("a.c", ["[]", None]),
        ("a.d.0.e", [None, '"x"']),
    ]


def test_a_long_text_keeps_both_ends():
    text = shortened("a" * 500 + "b" * 500, 300)
    assert text.startswith("a" * 200 + "\n[... 700 characters are left out here ...]")
    assert text.endswith("b" * 100)
    assert shortened("a" * 300, 300) == "a" * 300


def test_workers_that_say_the_same_stand_together():
    ranks = [{"rank": 0, "device": "A", "patches": []}, {"rank": 1, "device": "A", "patches": []}, {"device": "B"}]
    found = describe_workers({"trainer": ranks})
    assert [(one["ranks"], one["facts"]) for one in found] == [
        ("2 ranks: 0, 1", [["device", "A"]]),
        ("rank 2", [["device", "B"]]),
    ]
    assert devices({"trainer": ranks}) == "2 x A, 1 x B"
    assert devices({}) == ""


def test_every_metric_is_in_one_chapter():
    names = ["reward/mean", "reward/x/mean", "lr", "grad_norm", "mine", "mine/too", "critic/lr", "memory/a", "time/x_s"]
    found = chapters(names)
    assert sorted(name for chapter in found for name in chapter["metrics"]) == sorted(names)
    titles = {name: chapter["title"] for chapter in found for name in chapter["metrics"]}
    assert (titles["critic/lr"], titles["lr"], titles["mine/too"]) == ("Critic", "Optimizer", "Other")


def test_metrics_are_described_as_far_as_they_are_known():
    found = descriptions(["policy/entropy", "mine", "rollout/log_prob_abs_diff"], ["nowhere", "megatron"])
    assert found["policy/entropy"]["unit"] == "nats"
    assert "](" not in found["rollout/log_prob_abs_diff"]["meaning"]
    assert "mine" not in found


def test_names_are_as_short_as_they_can_be(tmp_path):
    assert short_names([tmp_path / "a" / "x", tmp_path / "a" / "y"]) == ["x", "y"]
    assert short_names([tmp_path / "a" / "x", tmp_path / "b" / "x"]) == ["a/x", "b/x"]


def test_a_plot_of_characters():
    assert plot([0, 1, 2, 3, 4, 5, 6, 7], 8) == ["".join(BLOCKS[1:])]
    assert plot([1, 1], 5) == ["\u2585\u2585"]
    assert plot([0.0, float("nan"), 1.0], 3, levels=PLAIN) == [".!@"]
    assert plot([float("inf")], 3, 2) == [" ", "!"]
    assert plot([], 3) == [""]
    assert plot([0, 2, 10, 12], 2) == ["\u2581\u2588"]
    assert plot([0, 1], 2, lines=2, levels=PLAIN) == [" @", ".@"]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_nothing_that_is_shown_moves_the_cursor(text, encoding):
    shown = visible(text, encoding)
    assert all(one == "\n" or one.isprintable() for one in shown)
    shown.encode(encoding)


def test_text_that_is_harmless_stays():
    assert visible("\u4e2d\u6587 \U0001f600\nx") == "\u4e2d\u6587 \U0001f600\nx"
