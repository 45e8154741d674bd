"""``anytron doctor`` as a person meets it."""

import json

import pytest

from tests.core.cli.conftest import EXAMPLE, anytron


def entries_of(done):
    """What ``anytron doctor --json`` has printed, by name."""
    entries = json.loads(done.stdout)["results"]
    assert {entry["status"] for entry in entries} <= {"passed", "warning", "failed", "skipped"}
    return {entry["name"]: entry for entry in entries}


def test_doctor_says_where_things_come_from(testchip):
    done = anytron("doctor", "--json", OMP_NUM_THREADS="3")

    found = entries_of(done)
    assert found["platform.choice"]["detail"].startswith("testchip: the one usable accelerator")
    assert found["platform.clock"]["detail"] == "slow: the tests are patient"
    assert found["devices.0"]["detail"].startswith("simulated chip, ")
    assert found["versions.torch"]["detail"].endswith("torch/__init__.py")
    assert found["environment.OMP_NUM_THREADS"]["detail"] == "3"
    assert found["environment.TORCH_DEVICE_BACKEND_AUTOLOAD"]["detail"] == "0"
    assert found["environment.TESTCHIP_RANK"]["detail"] == "trainer:0/1 (a plugin sets it for training ranks)"
    assert found["patches.testchip.mark"]["detail"].startswith("applies: testchip_engine")
    assert found["numbers.attention-thd"]["status"] == "passed"
    assert [entry for entry in found.values() if entry["status"] == "failed"] == []
    assert done.returncode == 0
    shown = anytron("doctor").stdout
    for topic in ("versions", "platform", "kernels", "numbers", "memory"):
        assert f"\n{topic} " in f"\n{shown}"
    assert "slow: the tests are patient" in shown
    assert "\n0 failed, " in shown


def test_doctor_survives_a_platform_that_cannot_be_used(clean):
    done = anytron("doctor", ANYTRON_PLATFORM="ascend")

    assert done.returncode == 1
    assert "Platform 'ascend'" in done.stdout
    assert "platform.choice failed" in done.stdout
    assert "Traceback" not in done.stderr


def test_doctor_looks_at_the_engines_that_the_configuration_names(clean):
    """And at its parallel sizes: the memory is that of a rank."""
    found = entries_of(anytron("doctor", EXAMPLE, "parallel.tensor_model_parallel_size=2", "--json"))
    alone = entries_of(anytron("doctor", EXAMPLE, "engine.name=nobody", "--json"))

    assert found["configuration.file"]["status"] == "passed"
    assert "versions.mcore-bridge" in found
    assert found["memory.machine"]["status"] == "passed"
    assert "2 training ranks" in found["memory.machine"]["detail"]
    assert "numbers" in found["memory.training-rank.optimizer"]["detail"]
    assert any(entry["status"] == "failed" and "nobody" in entry["detail"] for entry in alone.values())
    assert "versions.mcore-bridge" not in alone
    assert alone["numbers.log-probs"]["status"] == "passed"


@pytest.mark.slow
def test_doctor_says_that_a_run_will_not_fit(clean):
    """A model of some hundred billions, of which nothing is built."""
    sizes = ("hidden_size=16384", "intermediate_size=65536", "num_hidden_layers=64", "max_position_embeddings=4096")
    done = anytron("doctor", EXAMPLE, *(f"model.config.{size}" for size in sizes), "--json")

    total = entries_of(done)["memory.machine"]
    assert total["status"] == "failed"
    assert "it is too small" in total["detail"]
    assert done.returncode == 1


@pytest.mark.slow
def test_doctor_of_a_file_that_is_no_configuration_examines_the_machine(clean, tmp_path):
    (tmp_path / "run.yaml").write_text("model: {paht: x}\n")
    done = anytron("doctor", str(tmp_path / "run.yaml"), "--json")

    found = entries_of(done)
    assert found["configuration.file"]["status"] == "failed"
    assert "paht" in found["configuration.file"]["detail"]
    assert found["numbers.attention-thd"]["status"] == "passed"
    assert done.returncode == 1
