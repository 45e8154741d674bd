"""The pages that are generated are those of the code, and what they quote is there."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from anytron.base.errors import AnytronError
from anytron.cli import document as cli_page
from anytron.config.options import section_model
from anytron.config.schema import RunConfig
from anytron.record.checkpoint import differences as resumed_keys
from anytron.record.tracking import metric_table as metrics_page
from tests.docs import error_page, support_matrix
from tests.house import PACKAGES, ROOT, modules

REFERENCE = ROOT / "docs" / "reference"
GENERATED = {
    "cli.md": (cli_page, "anytron.cli.document"),
    "metrics.md": (metrics_page, "anytron.record.tracking.metric_table"),
    "errors.md": (error_page, "tests.docs.error_page"),
    "support-matrix.md": (support_matrix, "tests.docs.support_matrix"),
}


@pytest.mark.parametrize("page", GENERATED)
def test_a_page_in_the_tree_is_current(page):
    module, name = GENERATED[page]
    written = (REFERENCE / page).read_text(encoding="utf-8")
    assert written == module.render(), f"run: python -m {name} docs/reference/{page}"


def test_the_keys_that_may_change_are_those_of_the_code():
    page = (ROOT / "docs/how-to/resume-a-run.md").read_text(encoding="utf-8")
    assert page == resumed_keys.drawn(page), (
        "run: python -m anytron.record.checkpoint.differences docs/how-to/resume-a-run.md"
    )
    assert page.count("| `optimizer.lr` | remedy of") == 1


# ---- the command line ---------------------------------------------------------------------------------


def test_every_environment_variable_of_ours_is_on_the_page():
    named = re.compile(r"[\"'](ANYTRON_[A-Z_]*[A-Z])[\"']")
    used = {
        name for package in PACKAGES for path in modules(package).values() for name in named.findall(path.read_text())
    }
    assert used == set(re.findall(r"^\| `(ANYTRON_\w+)` \|", cli_page.render(), re.MULTILINE))


def test_every_argument_and_option_is_explained():
    rows = [line for line in cli_page.render().splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    assert [row for row in rows if row.rstrip().endswith("|  |")] == []


# ---- errors -------------------------------------------------------------------------------------------


def test_every_class_of_error_of_ours_is_on_the_page():
    def family(one):
        return {one, *(below for child in one.__subclasses__() for below in family(child))}

    ours = {one.__name__ for one in family(AnytronError) if one.__module__ == "anytron.base.errors"}
    assert ours == error_page.classes().keys()
    text = error_page.render()
    assert all(f"\n## {name}\n" in text for name in ours)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("'The disk is full.'", ["The disk is full."]),
        ("f'There is no {what} here'", ["There is no \u2039what\u203a here"]),
        ("'one ' + (f'{n} two' if n else 'none')", ["one \u2039n\u203a two", "one none"]),
        ("error.what", ["\u2039what\u203a"]),
        (
            "f'{path}:{before + 1}, {10 * limit}, {size // 2}'",
            ["\u2039path\u203a:\u2039before + 1\u203a, \u203910 \u00d7 limit\u203a, \u2039size / 2\u203a"],
        ),
        ("f'{count / 1e9:.3g} GB in {folder / name}'", ["\u2039count\u203a GB in \u2039folder\u203a"]),
        ("near(name) or 'look again'", ["\u2039near\u203a", "look again"]),
        (
            "f'{len(rows)} of {type(self).__name__}: {config.model.path!r}'",
            ["\u2039number\u203a of \u2039type\u203a: \u2039path\u203a"],
        ),
        ("', '.join(sorted(one.name for one in known))", ["\u2039name\u203a"]),
        ("FIX + f' {LIMIT}'", ["try again \u2039limit\u203a", "wait \u2039limit\u203a"]),
    ],
)
def test_texts_are_read_from_the_sources(source, said):
    scope = {"FIX": [ast.Constant("try again"), ast.Constant("wait")]}
    assert error_page.texts(ast.parse(source, mode="eval").body, scope) == said


BRANCHES = """
FIX = "ask again"

def check(small):
    fix = "shrink"
    if large:
        fix = "wait"
    yield Diagnostic("error", key, "too large", fix)
    if small:
        message, fix = "too small", "grow"
    else:
        message = f"more than {LIMIT}"
        fix = FIX
    yield Diagnostic("error", key, message, fix)
    message = "too late"
    yield Diagnostic("error", key, message, fix="hurry")
"""


def test_each_branch_s_message_has_the_fix_of_its_branch():
    found = {(one.what, one.fix) for one in error_page.raised_in(BRANCHES, "module", ["Diagnostic"])}
    assert found == {
        ("too small", ("grow",)),
        ("more than \u2039limit\u203a", ("ask again",)),
        ("too large", ("wait", "shrink")),
        ("too late", ("hurry",)),
    }


def test_an_entry_has_the_lines_of_the_error_and_names_what_is_filled_in():
    entry = re.search(r"^### There is no configuration file .*?(?=^##)", error_page.render(), re.DOTALL | re.MULTILINE)[
        0
    ]
    assert entry.splitlines() == [
        "### There is no configuration file *path*.",
        "",
        "- where: *parent*",
        "- why: no such file *or* no such directory",
        "- fix: did you mean *name*? *or* give the path of a YAML file",
        "- raised in `anytron.config.load`",
        "",
    ]
    assert "\u2026" not in error_page.render()


def test_the_errors_that_are_raised_are_found():
    found = {(one.name, one.what) for one in error_page.raised()}
    assert ("ConfigError", "The configuration has \u2039number\u203a mistakes.") in found
    assert ("EngineError", "Rollout and training log-probs differ.") in found
    assert ("PlatformError", "npu_fusion_attention does not support this number of heads.") in found
    assert len(found) > 250


def without_fix(errors):
    return {(one.name, one.what) for one in errors if not one.fix}


def test_each_error_says_how_to_fix_it():
    # Pydantic's own message says what the value should be.
    assert without_fix(error_page.raised()) == {("Diagnostic", "\u2039message\u203a; the value is \u2039input\u203a")}
    bare = ast.parse('def check():\n    raise DataError("It is empty.", why="it has no rows")')
    assert without_fix(error_page.raised_in(bare, "module", ["DataError"])) == {("DataError", "It is empty.")}


# ---- pages that quote ---------------------------------------------------------------------------------

TROUBLE = (ROOT / "docs/how-to/troubleshooting.md").read_text(encoding="utf-8")
HEADLINES = re.findall(r"^### (.*)$", TROUBLE, re.MULTILINE)


@functools.cache
def strings(path):
    """What the text constants of a file say."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def is_said(headline):
    """Whether an error has this headline, or one file says all its pieces."""
    if headline in {re.sub("\u2039.*?\u203a", "\u2026", one.what) for one in error_page.raised()}:
        return True
    pieces = [piece.strip(" :.") for piece in headline.split("\u2026") if any(map(str.isalpha, piece))]
    return any(
        all(any(piece in text for text in said) for piece in pieces)
        for package in PACKAGES
        for said in map(strings, modules(package).values())
    )


@pytest.mark.parametrize("headline", [*HEADLINES, *re.findall(r"`([A-Z][^`]*\.)`", TROUBLE)])
def test_an_error_of_the_troubleshooting_page_is_one(headline):
    assert is_said(headline)


def test_an_error_that_nobody_raises_is_noticed():
    assert len(HEADLINES) > 30
    assert not is_said("The moon is full.")


COMING = (ROOT / "docs/how-to/coming-from.md").read_text(encoding="utf-8")


def keys_of(model, prefix=""):
    """The dotted keys of a section and of those inside."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key
        inner = section_model(field.annotation)
        if inner is not None:
            yield from keys_of(inner, f"{key}.")


KNOWN = {*keys_of(RunConfig)}
SECTIONS = re.split(r"^## ", (REFERENCE / "config.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
OPTIONS = {
    f"{section.split()[0]}.{name}"
    for section in SECTIONS
    if ".options" in section.split()[0]
    for name in re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
}


def key_exists(key):
    return key in KNOWN | OPTIONS


def test_the_keys_that_others_options_become_exist():
    rows = [line.strip("|").split("|") for line in COMING.splitlines() if line.startswith("| ")]
    keys = {key for row in rows for key in re.findall(r"`([^`]+)`", row[1])}
    assert len(rows) > 150
    assert len(keys) > 60
    assert sorted(key for key in keys if not key_exists(key)) == []
    assert all("`" in row[1] or row[1].strip() in ("not there", "Anytron") for row in rows)


def test_a_key_that_is_not_there_is_noticed():
    assert not key_exists("rollout.temprature")
    assert not key_exists("rollout.options.temprature")
