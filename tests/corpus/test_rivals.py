"""Tests of other projects: the file names faults of the corpus, and says of each how it was judged."""

from __future__ import annotations

from tests.corpus.rivals import RUN_WITH, SEEN, suites
from tests.corpus.test_published import LONGEST, published

FIELDS = ["name", "link", "asserts", "seen", "applies_to", "notices"]
ENTRIES = {entry["name"] for entries in published().values() for entry in entries}


def test_each_test_is_described_and_names_faults_of_the_corpus():
    for suite in suites():
        assert suite["about"] in ("platforms", "numbers")
        names = [test["name"] for test in suite["tests"]]
        assert len(set(names)) == len(names)
        for test in suite["tests"]:
            assert list(test) == FIELDS
            assert test["link"].startswith("https://github.com/")
            assert test["asserts"].endswith(".")
            assert len(test["asserts"]) <= LONGEST
            assert test["seen"] in SEEN
            assert set(test["notices"]) <= set(test["applies_to"]) <= ENTRIES


def test_a_test_that_notices_a_fault_was_run_with_it():
    tests = [test for suite in suites() for test in suite["tests"]]
    assert all(test["seen"] == RUN_WITH for test in tests if test["notices"])


def test_the_tests_of_platforms_are_complete():
    counts = {suite["name"]: len(suite["tests"]) for suite in suites() if suite["about"] == "platforms"}
    assert list(counts.values()) == [13, 30, 14]
