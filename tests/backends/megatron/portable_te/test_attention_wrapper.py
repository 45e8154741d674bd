"""Megatron's own attention wrapper on the portable module: sinks, windows, GQA, segments; TP and CP."""

from __future__ import annotations


def test_megatrons_attention_is_the_definition_with_sinks_windows_and_segments(run_program):
    assert "equal" in run_program("attention_wrapper.py", ranks=2)
