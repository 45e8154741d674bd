"""Where the simulator cannot be used, it says why."""

import subprocess
import sys

import pytest
from anytron_ascend_simulator import SimulatorError, build
from anytron_ascend_simulator.kernels import KERNELS
from anytron_ascend_simulator.signatures import SIGNATURES


def test_every_entry_point_has_a_kernel():
    assert set(KERNELS) == set(SIGNATURES)


def test_another_torch_npu_is_refused(monkeypatch):
    monkeypatch.setattr(build, "version", lambda _: "2.7.1")
    with pytest.raises(SimulatorError, match=r"supports torch_npu 2\.13\.0 only.*2\.7\.1 is installed"):
        build.build()


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("ANYTRON_ASCEND_SIMULATOR_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SimulatorError, match=r"needs g\+\+: install it"):
        build.build()


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"ANYTRON_ASCEND_SIMULATOR": ""}, "set ANYTRON_ASCEND_SIMULATOR=1"),
        ({"ANYTRON_ASCEND_SIMULATOR_DIR": "/nowhere"}, "python -m anytron_ascend_simulator build"),
    ],
)
def test_what_to_do_stands_in_the_error(variables, text, run_program):
    program = "import anytron_ascend_simulator\nanytron_ascend_simulator.activate()\n"
    assert text in run_program(program, environment=variables, fails=True)[0]


def test_the_command_line_builds_once_and_says_where(monkeypatch, tmp_path):
    monkeypatch.setenv("ANYTRON_ASCEND_SIMULATOR_DIR", str(tmp_path))

    def command(name):
        program = [sys.executable, "-m", "anytron_ascend_simulator", name]
        return subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)

    assert "not built" in command("status").stdout
    first = command("build")
    assert first.returncode == 0, first.stderr
    assert str(tmp_path) in first.stdout
    assert command("status").returncode == 0
    libraries = {path.name for path in tmp_path.glob("*/lib*.so")}
    assert {"libascendcl.so", "libhccl.so", "libopapi.so"} <= libraries


def test_it_says_that_it_is_active(run_program):
    output = run_program("import anytron_ascend_simulator\nanytron_ascend_simulator.preload()\n")[0]
    assert "Ascend simulator: no NPU is used" in output
