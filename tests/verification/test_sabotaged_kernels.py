"""A kernel that depends on what else is in the call ends a run with ``engine.on_policy=bitwise`` in its first step.

The kit's rules name the same kernels (tests/conformance/invariance_mutants.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verification.saboteur import with_saboteur

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "engine.on_policy=bitwise",
    "rollout.engine=megatron",
    "data.prompts_per_step=4",
    "rollout.samples_per_prompt=2",
    "trainer.total_steps=2",
    "platform.name=sabotage",
)
"""Eight rows in generation, and more in training."""
PLUGIN = """
from tests.conformance import invariance_mutants

class Sabotage(invariance_mutants.{mutant}):
    pass

Sabotage.name = "sabotage"
"""
SORT, EXPERTS, LATENT = ("grpo_sort", ()), ("grpo_moe", ("rollout.samples_per_prompt=64",)), ("grpo_mla", ())
MUTANTS = {
    "SplitsKByTheRows": SORT,
    "LastRowByAnotherFormula": SORT,
    "AddsInTheOrderOfArrival": LATENT,
    "RowTilesByTheBatch": EXPERTS,
    "CountsKeysFromTheLast": SORT,
    "AddsInTheOtherOrder": SORT,
    "CacheInAnotherType": SORT,
    "DecodesByAFormulaOfItsOwn": SORT,
    "ScoresTheLastTokensByAnotherFormula": SORT,
    "NormsInChunks": SORT,
}
"""The mutants that a model this small can show, with an example and its settings. The others depend on sizes: on more
entries of a vocabulary or more keys than are here."""


def train(example, folder, environment, settings):
    command = [sys.executable, "-m", "anytron", "train", str(example), *settings, f"trainer.output_dir={folder}/run"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_first_step_ends_the_run(mutant, tmp_path):
    environment = with_saboteur(tmp_path, PLUGIN.format(mutant=mutant), "platforms")
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(ROOT)])
    name, settings = MUTANTS[mutant]
    example = ROOT / "examples" / f"{name}.yaml"
    done = train(example, tmp_path, environment, (*SETTINGS, *settings))

    assert done.returncode == 1, done.stdout[-2000:]
    assert "A token's log-prob in training differs from the rollout's" in done.stderr
    assert re.search(r"in this micro-batch [1-9]\d* of \d+ tokens differ", done.stderr)
    assert "step 1/2" not in done.stdout


@pytest.mark.slow
def test_a_run_without_sabotage_goes_on(tmp_path):
    done = train(ROOT / "examples" / "grpo_sort.yaml", tmp_path, dict(os.environ), SETTINGS[:-1])

    assert (done.returncode, "step 1/2" in done.stdout) == (0, True), done.stderr
