"""The platform `accelerator` on the invented device: offered, never chosen; it trains as the processor does."""

import json
import os

import pytest

from tests.backends.megatron.redirect import test_collectives as collectives
from tests.invented_device.conftest import EXAMPLE, PROGRAMS
from tests.invented_device.faults import FAULTS

pytestmark = pytest.mark.compiler

NUMBERS = ("reward/mean", "loss/total", "policy/entropy", "grad_norm")


def steps(path):
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in NUMBERS} for line in lines if "loss/total" in line]


def test_a_device_that_no_platform_covers_is_not_passed_over(anytron):
    for command in (("train", EXAMPLE), ("doctor",)):
        done = anytron(*command)
        assert done.returncode != 0
        said = done.stdout + done.stderr
        assert "has an accelerator, but no platform for it is installed" in said.replace("\n", " ")
        for way in ("platform.name=accelerator", "anytron new-platform NAME", "platform.name=cpu"):
            assert way in said
    done = anytron("train", EXAMPLE, "platform.name=invented")
    assert "The installed package torch_invented adds a device to torch" in done.stderr
    assert "anytron new-platform invented" in done.stderr


@pytest.mark.parametrize("total", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_it_trains_as_the_processor_does(anytron, tmp_path, total):
    for platform in ("accelerator", "cpu"):
        done = anytron(
            "train", EXAMPLE, f"platform.name={platform}", f"trainer.total_steps={total}",
            f"trainer.output_dir={tmp_path / platform}",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"started on 1 x {'cpu' if platform == 'cpu' else 'invented'}" in done.stdout
    found, wanted = steps(tmp_path / "accelerator"), steps(tmp_path / "cpu")
    assert len(found) == total
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9)


@pytest.mark.slow
def test_the_kit_finds_no_fault_in_it(anytron):
    done = anytron(
        "conformance", "accelerator", "--level", "device", "--level", "sequences", "--level", "kernels", "--json"
    )
    report = json.loads(done.stdout)
    statuses = {result["name"]: result["status"] for result in report["results"]}
    unknown = {name for name, status in statuses.items() if status != "passed"}
    assert unknown == {"device.own-generator", "device.patches-take-effect"}, statuses
    assert {statuses[name] for name in unknown} == {"skipped"}


def test_the_kit_finds_each_fault(run, tmp_path):
    done = run(str(PROGRAMS / "notice.py"), str(tmp_path / "scratch"))
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    faulty = {result["fault"]: result for result in results if result["fault"]}
    for fault in FAULTS:
        assert faulty[fault.name]["status"] == "failed", fault
        assert fault.says in faulty[fault.name]["says"], faulty[fault.name]
    assert {result["status"] for result in results if not result["fault"]} == {"passed"}


def test_parameters_keep_what_marks_them(run):
    done = run(str(PROGRAMS / "marks.py"))
    assert done.returncode == 0, done.stderr
    before, refusal, *kept, after, tied_in_the_rollout = map(json.loads, done.stdout.splitlines())
    assert tied_in_the_rollout
    assert before == after == {"device": "invented", "mark": None, "tied": False, "hook": False}
    assert kept == 3 * [{"device": "invented", "mark": True, "tied": True, "hook": True}]
    assert "inner.weight" in refusal
    assert "sequence_parallel" in refusal


def test_collectives_go_through_host_memory(device, tmp_path):
    every = [*collectives.RESTRICTED, *collectives.UNRESTRICTED]
    found = collectives.run(every, tmp_path, True, "accelerator", PYTHONPATH=device["PYTHONPATH"])
    assert found == collectives.right(*every)


def test_operators_that_the_host_computes_are_named(anytron):
    done = anytron("doctor", "--json", ANYTRON_PLATFORM="accelerator", INVENTED_FAULT="operators-on-the-host")
    results = {result["name"]: result for result in json.loads(done.stdout)["results"]}
    assert results["operators.kernels"]["status"] == "warning"
    detail = results["operators.kernels"]["detail"]
    assert "_softmax (1)" in detail
    assert "mm (11)" in detail
    assert "add.Tensor (" in detail
    assert "mul" not in detail
    assert results["numbers.attention-thd"]["status"] == "passed"


FORGETFUL = """
from anytron import AcceleratorRuntime, Availability, Platform, Probe


class Forgetful(Platform):
    name = "forgetful"
    api_version = 1

    def probe(self):
        return Probe(Availability.USABLE, "two devices", devices=2)

    def runtime(self):
        import torch_invented

        class Runtime(AcceleratorRuntime):
            device_type = "invented"
            communication_backend = "gloo"

        return Runtime()
"""


@pytest.mark.slow
def test_the_error_names_the_missing_device_packages(anytron, tmp_path, device):
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    information = tmp_path / "forgetful-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: forgetful\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[anytron.platforms]\nforgetful = forgetful:Forgetful\n")
    path = os.pathsep.join([str(tmp_path), device["PYTHONPATH"]])
    for command in (("doctor",), ("train", EXAMPLE)):
        done = anytron(*command, PYTHONPATH=path, ANYTRON_PLATFORM="forgetful")
        assert done.returncode != 0
        said = " ".join((done.stdout + done.stderr).split())
        assert """add to the platform's class: device_packages = ("torch_invented",)""" in said, said


@pytest.mark.slow
def test_two_ranks_of_one_model_train_as_one(anytron, tmp_path):
    for size in (1, 2):
        done = anytron(
            "train", EXAMPLE, "platform.name=accelerator", "trainer.total_steps=4", "rollout.engine=megatron",
            f"parallel.tensor_model_parallel_size={size}", f"trainer.output_dir={tmp_path / str(size)}",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"started on {size} x invented" in done.stdout
    for one, other in zip(steps(tmp_path / "2"), steps(tmp_path / "1"), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_it_trains_through_ray(anytron, tmp_path):
    for kind in ("ray", "local"):
        done = anytron(
            "train", EXAMPLE, "platform.name=accelerator", "trainer.total_steps=3", f"executor.kind={kind}",
            f"trainer.output_dir={tmp_path / kind}",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "started on 1 x invented" in done.stdout
    for one, other in zip(steps(tmp_path / "ray"), steps(tmp_path / "local"), strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("level", ["model", "training"])
def test_the_kit_finds_no_fault_in_its_training(anytron, level):
    done = anytron("conformance", "accelerator", "--level", level, "--json")
    assert {result["status"] for result in json.loads(done.stdout)["results"]} == {"passed"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "softmax-forgets-keys"])
def test_verify_compares_with_the_host(anytron, fault):
    """With transformers on the device too, attention that is wrong there would be wrong on both sides."""
    done = anytron("verify", EXAMPLE, "platform.name=accelerator", "--json", INVENTED_FAULT=fault)
    results = {result["name"]: result for result in json.loads(done.stdout)["results"]}
    for name in ("hf-logits", "hf-log-probs", "hf-gradients", "mask-conformance"):
        assert results[name]["status"] == ("failed" if fault else "passed"), results[name]
    assert "transformers on the host" in results["hf-logits"]["detail"]
    assert bool(done.returncode) == bool(fault)
