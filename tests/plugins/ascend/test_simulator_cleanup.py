"""The simulator's directories in /dev/shm, where everybody may write: what its clean-up removes, and what it leaves.

``directories.h`` is compiled by itself; that communicators use it is shown on the simulator, with torch_npu.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[3] / "plugins/ascend/simulator/anytron_ascend_simulator/csrc"
PROGRAM = """
#include <cstdio>
#include "directories.h"
int main(int, char** arguments) {
  const std::string what = arguments[1], root = arguments[2];
  if (what == "clean") return directories::remove_leftovers(root, "anytron-hccl-"), 0;
  std::string path;
  if (directories::make(root, "anytron-hccl-", &path) < 0) return 1;
  std::puts(path.c_str());
  std::fflush(stdout);
  return std::getchar();  // held until the other side closes
}
"""

compiler = pytest.mark.compiler


def build(folder, sources=SOURCES):
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    (folder / "program.cpp").write_text(PROGRAM)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{sources}"]
    subprocess.run(["g++", *flags, folder / "program.cpp", "-o", folder / "program"], check=True, timeout=120)
    return folder / "program"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build(tmp_path_factory.mktemp("program"))


@pytest.fixture
def clean(program, tmp_path):
    return lambda: subprocess.run([program, "clean", tmp_path], check=True, timeout=60)


@pytest.fixture
def holder(program, tmp_path):
    """A process that has made a directory and holds it."""
    with subprocess.Popen([program, "make", tmp_path], stdin=-1, stdout=-1, text=True) as process:
        yield process, Path(process.stdout.readline().strip())
        process.stdin.close()


@compiler
def test_a_live_directory_is_private_and_stays(clean, holder):
    process, path = holder
    (path / "collective-0.0").touch()
    assert path.stat().st_mode & 0o777 == 0o700
    assert str(process.pid) not in path.name
    clean()
    assert (path / "collective-0.0").exists()


@compiler
def test_what_a_killed_process_left_is_removed(clean, holder):
    process, path = holder
    (path / "collective-0.0").touch()
    process.kill()
    process.wait()
    clean()
    assert not path.exists()


@compiler
def test_a_planted_link_is_not_followed(clean, tmp_path):
    papers = tmp_path / "papers"
    papers.mkdir()
    (papers / "paper.txt").touch()
    (tmp_path / "anytron-hccl-1-0").symlink_to(papers)
    inside = tmp_path / "anytron-hccl-abcdef"
    inside.mkdir()
    (inside / "link").symlink_to(papers / "paper.txt")
    clean()
    assert (papers / "paper.txt").exists()
    assert (tmp_path / "anytron-hccl-1-0").is_symlink()
    assert not inside.exists()


@compiler
def test_without_its_flag_a_planted_link_would_be_followed(tmp_path):
    for folder in ("papers", "shm"):
        (tmp_path / folder).mkdir()
    (tmp_path / "papers" / "paper.txt").touch()
    (tmp_path / "shm" / "anytron-hccl-1-0").symlink_to(tmp_path / "papers")
    header = (SOURCES / "directories.h").read_text(encoding="utf-8")
    (tmp_path / "directories.h").write_text(header.replace("O_NOFOLLOW | ", ""), encoding="utf-8")
    subprocess.run([build(tmp_path, tmp_path), "clean", tmp_path / "shm"], check=True, timeout=60)
    assert not (tmp_path / "papers" / "paper.txt").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_what_belongs_to_another_user_stays(clean, tmp_path):
    theirs = tmp_path / "anytron-hccl-abcdef"
    theirs.mkdir()
    (theirs / "file").touch()
    os.chown(theirs, 65534, 65534)
    clean()
    assert (theirs / "file").exists()
