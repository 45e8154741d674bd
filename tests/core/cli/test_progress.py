"""A run is shown as a bar on a terminal, as lines elsewhere, and not at all if so wished."""

import io
import re

import pytest

from anytron.cli.output import VisibleConsole
from anytron.cli.progress import make_progress

METRICS = {"step": 3, "reward/mean": 0.51234, "throughput/tokens_per_s": 12345.6, "time/step_s": 0.125}


KERNELS = {"attention_kernel": "acme", "fused_kernel rms_norm": "neutral-default", "log_prob_kernel": "acme"}
SUPPLIED = "kernels: attention, log_prob from acme; rms_norm from neutral-default"


def show(*, terminal, shown=True):
    output = io.StringIO()
    with make_progress(VisibleConsole(output, force_terminal=terminal, width=120), shown=shown) as progress:
        progress.start(10, ["Chip", "Chip"], KERNELS)
        progress.step(METRICS)
        progress.part("rollout")
        progress.finish()
    return output.getvalue()


def test_elsewhere_it_is_one_plain_line_per_step():
    assert show(terminal=False).splitlines() == [
        "started on 2 x Chip",
        SUPPLIED,
        "step 3/10  reward 0.512  12,346 tokens/s  0.12 s/step",
    ]


def test_on_a_terminal_it_is_a_bar_with_reward_and_throughput():
    drawn = show(terminal=True)

    assert "x Chip" in drawn
    assert "log_prob from acme" in drawn
    assert "3/10" in drawn
    assert "reward 0.512  12,346 tokens/s" in drawn
    assert "rollout since " in drawn, "what a run waits for that does not get on"


def test_it_can_be_silent():
    assert show(terminal=True, shown=False) == ""


def test_an_error_gives_the_terminal_back():
    output = io.StringIO()
    hide_cursor, show_cursor = "\x1b[?25l", "\x1b[?25h"

    with pytest.raises(RuntimeError), make_progress(VisibleConsole(output, force_terminal=True), shown=True):
        raise RuntimeError

    assert output.getvalue().rindex(show_cursor) > output.getvalue().rindex(hide_cursor)


@pytest.mark.parametrize(("terminal", "shown"), [(True, True), (False, True), (True, False)])
def test_a_warning_is_shown_in_any_case(terminal, shown):
    output = io.StringIO()
    with make_progress(VisibleConsole(output, force_terminal=terminal, width=120), shown=shown) as progress:
        progress.warn("grad_norm is 0 [really]")
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", output.getvalue())
    assert "warning: grad_norm is 0 [really]" in text
