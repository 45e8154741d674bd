"""The report as a file: whole, small, closed to what is hostile. How it looks is tested in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import pytest

from anytron.base.errors import ConfigError
from anytron.record.report.page import LARGEST, MARK, duration, render
from anytron.record.report.run import Run
from anytron.record.tracking.record import Change, Resume
from tests.core.record.report.runs import HOSTILE, make_run, metrics, record, sample


class Elements(HTMLParser):
    """The elements of a page, and the texts of its scripts, as an HTML parser sees them."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.found, self.texts, self._within = [], {}, None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        self._within = f"{tag} {dict(attributes).get('type', '')}".strip()

    def handle_endtag(self, tag):
        self._within = None

    def handle_data(self, data):
        if self._within:
            self.texts[self._within] = self.texts.get(self._within, "") + data


def content_of(page):
    return json.loads(Elements(page).texts["script application/json"])


def tags(page):
    return [tag for tag, _ in Elements(page).found]


def test_it_shows_what_the_run_has_left(tmp_path):
    resumes = [Resume(step=7, changes=[Change(key="rollout.options.api_key", old="old-1", new="new-1")])]
    run = make_run(tmp_path / "sort", run=record(finished_step=30, resumes=resumes, versions={"torch": "2.13.0"}))
    loss = {"time": "2026-01-01", "after_step": 9, "lost": "Rank 1 died.", "why": "signal 9", "then": "it goes on"}
    (run / "losses.jsonl").write_text(json.dumps(loss) + "\n")
    (run / "logs" / "driver.log").write_text("2026-01-01 warning: grad_norm is 0\n")

    page = render([Run(run)])
    content = content_of(page)

    assert page.startswith(MARK)
    (shown,) = content["runs"]
    assert shown["state"] == "finished"
    assert ["step", "30 of 30"] in shown["facts"]
    assert ["trained on", "2 x Chip 9"] in shown["facts"]
    assert shown["series"]["grad_norm"] == [list(range(1, 31)), [float(f"{3 / step:.6g}") for step in range(1, 31)]]
    assert shown["losses"][0]["lost"] == "Rank 1 died."
    assert shown["log"] == ["2026-01-01 warning: grad_norm is 0"]
    assert (shown["resumes"][0]["step"], shown["versions"]) == (7, {"torch": "2.13.0"})
    assert "old-1" not in page
    assert "new-1" not in page
    assert [one["ranks"] for one in shown["workers"]] == ["2 ranks: 0, 1", "rank 0"]
    assert content["leading"][0] == "reward/mean"
    assert "policy/kl" in content["leading"]
    assert "loss/kl" not in content["leading"], "it is 0 wherever the penalty is not part of the loss"
    assert dict(content["settings"])["trainer.total_steps"] == ["30"]


def test_several_runs_stand_in_one_report(tmp_path):
    runs = [make_run(tmp_path / "a" / "x"), make_run(tmp_path / "b" / "x", 3, run=record())]
    content = content_of(render([Run(path) for path in runs]))
    assert [(run["name"], run["state"]) for run in content["runs"]] == [
        ("a/x", "finished"),
        ("b/x", "stopped before its last step"),
    ]


def test_numbers_that_are_not_finite_are_words(tmp_path):
    odd = {1: math.nan, 2: math.inf, 3: -math.inf}
    path = make_run(tmp_path / "run", 4, metrics_of=lambda step: metrics(step) | {"lr": odd.get(step, 1e-6)})
    assert content_of(render([Run(path)]))["runs"][0]["series"]["lr"][1] == ["nan", "inf", "-inf", 1e-6]


def test_a_run_without_a_step_has_a_report(tmp_path):
    path = make_run(tmp_path / "run", 0, run=record())
    for name in ("metrics.jsonl", "samples.jsonl", "patches.json"):
        (path / name).unlink()
    (shown,) = content_of(render([Run(path)]))["runs"]
    assert (shown["series"], shown["samples"], shown["workers"]) == ({}, [], [])


def hostile_run(path):
    """A run in which everything that can be is hostile."""
    texts = list(HOSTILE)
    run = make_run(
        path / HOSTILE[0].replace("/", "-"),
        run=record(failure=HOSTILE[0], versions={HOSTILE[1]: HOSTILE[2]}),
        metrics_of=lambda step: metrics(step) | {HOSTILE[0]: 1.0, HOSTILE[1]: math.nan, "__proto__": 2.0},
        samples_of=lambda step: [
            sample(step, n, prompt=text, response=text, prompt_id=text, reward_errors={text: text})
            for n, text in enumerate(texts)
        ],
    )
    (run / "logs" / "driver.log").write_bytes("\n".join(texts).encode(errors="replace") + b"\n")
    workers = {text[:50]: [{"device": text, text: text, "patches": [{"id": text, "reason": text}]}] for text in texts}
    (run / "patches.json").write_text(json.dumps(workers))
    (run / "losses.jsonl").write_text(json.dumps({"after_step": HOSTILE[0], "lost": HOSTILE[0]}) + "\n")
    return run


def test_nothing_hostile_becomes_an_element(tmp_path):
    page = render([Run(hostile_run(tmp_path))])
    harmless = render([Run(make_run(tmp_path / "harmless"))])
    assert page.isascii()
    assert tags(page) == tags(harmless)
    assert tags(page).count("script") == 2
    samples = content_of(page)["runs"][0]["samples"]
    assert {one["prompt"] for one in samples} >= {text for text in HOSTILE if len(text) < 1000}


def test_an_element_that_came_from_a_run_would_be_noticed(tmp_path):
    page = render([Run(hostile_run(tmp_path))])
    open_to_it = page.replace("\\u003c", "<")
    assert tags(open_to_it) != tags(page)


def test_nothing_is_loaded_and_nothing_else_may_run(tmp_path):
    page = render([Run(make_run(tmp_path / "run"))])
    elements = Elements(page)
    assert [attributes for _, attributes in elements.found if {"src", "href"} & attributes.keys()] == []
    assert not re.search(r"url\(|@import", elements.texts["style"])
    policy = next(one["content"] for tag, one in elements.found if "http-equiv" in one)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for text in (elements.texts["script"], elements.texts["style"]):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy


def test_however_long_runs_are_the_report_is_small(tmp_path):
    def many(step):
        return metrics(step) | {f"mine/{number}": math.sin(step + number) for number in range(60)}

    def long(step):
        return [sample(step, number, response="\u4e2d" * (9000 if step < 9 else 90)) for number in range(4)]

    paths = [make_run(tmp_path / f"run{number}", 2000, metrics_of=many, samples_of=long) for number in range(2)]
    page = render([Run(path) for path in paths])
    assert 1_500_000 < len(page) < LARGEST
    for run in content_of(page)["runs"]:
        steps = {one["step"] for one in run["samples"]}
        assert {1, 2000} <= steps
        assert run["left_out"]
        assert run["section"] > 2, "and it says how many steps a part of a line stands for"
    assert content_of(render([Run(make_run(tmp_path / "short"))]))["runs"][0]["section"] == 1


def test_a_report_that_cannot_be_small_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="too large"):
        render([Run(make_run(tmp_path / "run"))], largest=20_000)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"), (3600, "1 h 0 min"), (200_000, "2 d 7 h")],
)
def test_times_are_said_in_two_units(seconds, said):
    assert duration(seconds) == said
