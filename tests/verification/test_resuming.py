"""Weights after a resume and an update, compared with those of a run that goes on."""

from __future__ import annotations

import torch

from anytron.proof.verification.resuming import compare_resumed

BEFORE = {"frozen": torch.ones(3), "trained": torch.ones(4)}
WANTED = {"frozen": torch.ones(3), "trained": torch.tensor([1.1, 0.9, 1.1, 0.9])}


def test_the_same_update_passes():
    result = compare_resumed("resumed-equals-continued", BEFORE, WANTED, WANTED)
    assert (result.status, result.difference) == ("passed", 0.0)


def test_a_longer_step_fails_and_the_weight_is_named():
    found = {**WANTED, "trained": torch.tensor([1.2, 0.8, 1.2, 0.8])}
    result = compare_resumed("resumed-equals-continued", BEFORE, WANTED, found)
    assert result.status == "failed"
    assert result.detail.startswith("1 of 2 weights differ after a resume and an update, trained by 1 of its step: ")


def test_a_weight_that_moves_only_after_a_resume_fails():
    found = {**WANTED, "frozen": torch.zeros(3)}
    assert compare_resumed("resumed-equals-continued", BEFORE, WANTED, found).status == "failed"
