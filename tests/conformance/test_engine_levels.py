"""Levels ``model`` and ``training``: the processor keeps their rules, and each sabotaged platform breaks its own."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from anytron_conformance.model.observed import FAMILIES
from anytron_conformance.rules import rules_of
from anytron_conformance.subject import Source, Subject
from anytron_conformance.tiny_models import CONFIGS
from anytron_conformance.worker import check_rule
from tests.backends.megatron.families.layouts import MODELS
from tests.conformance import engine_mutants
from tests.conformance.mutant import mutants_of

RULES = {rule.title: rule for level in ("model", "training") for rule in rules_of(level)}
MUTANTS = mutants_of(engine_mutants)
QUICK = ("OtherEntropy",)
"""The others are left to ``tox -e slow``."""
ONE_RANK = ("model-logits", "model-log-probs", "model-gradients", "packed-equals-padded")
"""Rules of which the normal suite checks one family."""


@pytest.fixture
def open_subject(tmp_path, monkeypatch):
    """Open a platform under its name, as installed."""
    monkeypatch.syspath_prepend(tmp_path)
    opened = []

    def opening(name, value=None):
        if value is not None:
            info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[anytron.platforms]\n{name} = {value}\n")
            importlib.invalidate_caches()
        source = Source(name)
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        opened.append(Subject(source, source.open(), scratch))
        return opened[-1]

    yield opening
    for subject in opened:
        subject.close()


def test_the_processor_computes_a_dense_model_right(open_subject):
    subject = open_subject("cpu")
    for name in ONE_RANK:
        rule = replace(RULES[name], cases=tuple(RULES[name].cases_for(subject)[:1]))
        result = check_rule(rule, subject)
        assert result.status == "passed", result.explanation


@pytest.mark.slow
@pytest.mark.parametrize("level", ["model", "training"])
def test_the_processor_keeps_every_rule(level, open_subject):
    subject = open_subject("cpu")
    results = [check_rule(rule, subject) for rule in rules_of(level)]
    assert {result.name: result.explanation for result in results if result.status != "passed"} == {}
    assert [result.left_out for result in results if result.left_out] == []


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(one, marks=() if one.__name__ in QUICK else pytest.mark.slow) for one in MUTANTS],
    ids=lambda mutant: mutant.__name__,
)
def test_a_sabotaged_platform_is_caught(mutant, open_subject):
    subject = open_subject(mutant.name, f"{mutant.__module__}:{mutant.__name__}")

    result = check_rule(RULES[mutant.rule], subject)

    assert result.status == "failed"
    assert mutant.says in result.explanation


def test_the_kits_families_are_those_that_the_normal_suite_proves():
    proved = {model.family.model_type for model in MODELS}
    assert {CONFIGS[family.name]["model_type"] for family in FAMILIES} == proved
