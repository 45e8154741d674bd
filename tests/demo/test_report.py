"""The report of real runs, in a real browser."""

import pytest

from tests.browser import NEEDS_BROWSER, browsing
from tests.demo.test_grpo_sort import EXAMPLE, anytron

pytestmark = [*NEEDS_BROWSER, pytest.mark.slow, pytest.mark.timeout(900)]
LARGEST = 3_000_000
"""Bytes of a page that can still be sent to somebody."""


def test_two_runs_are_shown_without_a_complaint(tmp_path):
    few = ("trainer.total_steps=3", "trainer.save_hf=false", "data.prompts_per_step=8", "rollout.samples_per_prompt=8")
    for name, penalty in (("a", "loss"), ("b", "reward")):
        kl = ("algorithm.kl_coefficient=0.01", f"algorithm.kl_placement={penalty}")
        done = anytron("train", str(EXAMPLE), f"trainer.output_dir={tmp_path / name}", *few, *kl)
        assert done.returncode == 0, done.stdout + done.stderr
    page = tmp_path / "report.html"
    done = anytron("report", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    assert page.stat().st_size < LARGEST

    with browsing(tmp_path / "profile") as browser:
        browser.open(page)
        assert browser.complaints == []
        assert browser.requests == [page.as_uri()]
        rows = browser.evaluate(
            "[...document.querySelectorAll('#configuration tbody tr')]"
            ".map(row => [...row.children].map(one => one.textContent))"
        )
        assert ["algorithm.kl_placement", '"loss"', '"reward"'] in rows
        for metric in ("reward/mean", "policy/kl", "time/step_s"):
            drawn = f"document.querySelectorAll('[data-metric=\"{metric}\"] path.smooth')"
            paths = browser.evaluate(f"[...{drawn}].map(one => one.getAttribute('d'))")
            assert len(paths) == 2, f"{metric} of both runs"
            assert all(path and "NaN" not in path for path in paths)
        assert browser.evaluate("document.querySelectorAll('#samples .end h3').length") == 4
