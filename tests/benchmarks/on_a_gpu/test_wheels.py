"""Which wheels are carried, and which of them an image gets."""

from __future__ import annotations

import importlib
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

TORCH = ("torch", "2.11.0+cu130")
WHEELS = {
    "anytron": ("0.1.dev7+g0123abcde", ["transformers>=5.0,<6", "typer>=0.16", "torch>=2.6", "tidy; extra == 'dev'"]),
    "anytron-conformance": ("0.1.dev7+g0123abcde", ["anytron>=0.1.dev0,<0.2"]),
    "anytron-cuda": ("0.1.dev7+g0123abcde", ["anytron>=0.1.dev0,<0.2"]),
    "transformers": ("5.23.0", ["huggingface-hub>=2,<3", "old; python_version < '3'"]),
    "huggingface-hub": ("2.4.0", []),
    "peft": ("0.20.0", ["huggingface-hub>=2"]),
    "typer": ("0.29.2", []),
    "liger-kernel": ("0.8.5", ["triton>=2.3.1"]),
}


@pytest.fixture
def plan(load):
    """Plan for an image of these distributions; return what comes from wheels, what is lacking, what is left out."""
    wheels = load("wheels")

    def run(image, *, without=(), roots=("anytron", "anytron-conformance", "anytron-cuda"), optional=()):
        carried = {
            name: wheels.Distribution(name, version, tuple(requires), Path(f"{name}.whl"))
            for name, (version, requires) in WHEELS.items()
            if name not in without
        }
        there = {name: wheels.Distribution(name, version, tuple(requires)) for name, version, *requires in image}
        found, left_out = wheels.plan_with(roots, optional, carried, there.get)
        return {wheel.stem for wheel in found.wheels}, found.lacking, left_out

    return run


OWN = {"anytron", "anytron-conformance", "anytron-cuda"}


@pytest.mark.parametrize(
    ("image", "from_wheels"),
    [
        ([TORCH], OWN | {"transformers", "huggingface-hub", "typer"}),
        ([TORCH, ("typer", "0.20"), ("transformers", "5.17", "huggingface-hub"), ("huggingface-hub", "1.33")], OWN),
        ([TORCH, ("typer", "0.20.0"), ("transformers", "5.17.0", "huggingface-hub>=1")], OWN | {"huggingface-hub"}),
        ([TORCH, ("typer", "0.9.0"), ("transformers", "5.17.0")], OWN | {"typer"}),
        ([TORCH, ("typer", "0.20"), ("transformers", "4.40.0"), ("huggingface-hub", "0.23.0")],
         OWN | {"transformers", "huggingface-hub"}),
        ([TORCH, ("anytron", "0.0.1"), ("typer", "0.20"), ("transformers", "5.17")], OWN),
        ([("torch", "2.8.0a0+34c6371d24.nv25.8"), ("typer", "1"), ("transformers", "5.1", "vanished>=1")], OWN),
    ],
    ids=["bare", "has-all", "lacks-one-below", "one-is-old", "two-are-old", "an-older-anytron", "a-build-of-its-own"],
)  # fmt: skip
def test_an_image_gets_what_it_lacks_and_keeps_what_fits(plan, image, from_wheels):
    assert plan(image) == (from_wheels, (), {})


def test_what_another_wheel_is_too_new_for_comes_from_a_wheel_too(plan):
    image = [TORCH, ("typer", "1"), ("peft", "0.19", "huggingface-hub<2"), ("huggingface-hub", "1.0")]
    assert plan(image, roots=("anytron", "peft")) == (
        {"anytron", "transformers", "huggingface-hub", "peft"},
        (),
        {},
    )


def test_what_neither_has_is_named_with_who_needs_it(plan):
    _, lacking, _ = plan([("torch", "2.5.1")], without=["typer"])
    assert lacking == ("typer>=0.16 (needed by anytron)", "torch>=2.6 (needed by anytron); 2.5.1 is there")


def test_what_is_used_if_it_can_be_is_left_out_where_something_is_lacking(plan):
    image, optional = [TORCH, ("typer", "1"), ("transformers", "5.1")], ["liger-kernel", "peft"]
    left_out = {"liger-kernel": ["triton>=2.3.1 (needed by liger-kernel)"]}
    assert plan(image, optional=optional) == (OWN | {"peft", "huggingface-hub"}, (), left_out)
    assert plan([*image, ("triton", "3.4.0")], optional=["liger-kernel"]) == (OWN | {"liger-kernel"}, (), {})


def test_every_requirement_of_anytron_and_its_tests_is_on_the_list(load):
    """What is installed here beside Anytron, torch and what torch needs."""
    wheels, image, prepare, run = map(load, ("wheels", "image", "prepare", "run"))
    parse = importlib.import_module("pip._vendor.packaging.requirements").Requirement
    found = set(wheels.plan([name for name in run.NEEDED if name != "anytron-cuda"], {}, image.installed).chosen)
    of_torch = {wheels.normalised(parse(line).name) for line in image.installed("torch").requires} | {"torch"}
    carried = {wheels.normalised(parse(line).name) for line in prepare.names()}
    assert len(found) > 50
    assert found - carried - of_torch == {"anytron"}
    assert not any(wheels.TORCH.fullmatch(name) for name in carried)


@given(st.lists(st.integers(1, 10), max_size=30))
def test_pieces_hold_every_wheel_once_and_none_is_too_large(sizes):
    from benchmarks.on_a_gpu.wheels import pieces

    filled = pieces(sizes, 12)
    assert sorted(index for piece in filled for index in piece) == list(range(len(sizes)))
    assert all(sum(sizes[index] for index in piece) <= 12 for piece in filled)
    # A later piece is begun only where no earlier one had room.
    for number, piece in enumerate(filled):
        for earlier in filled[:number]:
            before = sum(sizes[index] for index in earlier if index < piece[0])
            assert before + sizes[piece[0]] > 12


def test_a_wheel_that_no_piece_can_hold_is_refused(load):
    with pytest.raises(ValueError, match="13 bytes is larger than a piece, 12 bytes"):
        load("wheels").pieces([13], 12)


def test_platform_tags_go_down_to_the_oldest(load):
    tags = load("prepare").tags("manylinux_2_28_x86_64")
    assert tags[0] == "manylinux_2_28_x86_64"
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64"} < set(tags)
    with pytest.raises(SystemExit, match="is none of manylinux_2_N"):
        load("prepare").tags("linux_x86_64")


def test_two_versions_of_one_are_refused_and_an_old_state_of_the_source_is_noticed(load, tmp_path):
    wheels = load("wheels")

    def write(version, source):
        with zipfile.ZipFile(tmp_path / f"anytron-{version}-py3-none-any.whl", "w") as file:
            file.writestr(f"anytron-{version}.dist-info/METADATA", f"Name: anytron\nVersion: {version}\n")
            file.writestr("anytron/one.py", source)

    tree = tmp_path / "tree" / "core" / "anytron"
    tree.mkdir(parents=True)
    (tree / "one.py").write_text("1")
    write("0.1.0", "1")
    assert wheels.stale(wheels.carried(tmp_path), tmp_path / "tree") == []
    (tree / "two.py").write_text("2")
    (tree / "one.py").write_text("3")
    assert wheels.stale(wheels.carried(tmp_path), tmp_path / "tree") == ["anytron/one.py", "anytron/two.py"]
    write("0.2.0", "3")
    with pytest.raises(SystemExit, match="two wheels of anytron"):
        wheels.carried(tmp_path)
