"""What SECURITY.md promises, broken on purpose: each twin takes one border away, and the row's test must notice.

    python -m tests.docs.twins [WORD ...]

runs those whose test has one of the words in its name, or all of them, and ends with status 1 if a test passes without
its border.
"""

from tests.docs.twins.backends import BACKENDS
from tests.docs.twins.others import OTHERS
from tests.docs.twins.serving import SERVING
from tests.docs.twins.task import TASK
from tests.docs.twins.workers import WORKERS

TWINS = (*TASK, *WORKERS, *OTHERS, *SERVING, *BACKENDS)
ELSEWHERE = {
    "tests/plugins/ascend/test_simulator_cleanup.py::test_a_planted_link_is_not_followed": (
        "tests/plugins/ascend/test_simulator_cleanup.py::test_without_its_flag_a_planted_link_would_be_followed"
    ),
    "tests/core/test_dangerous_calls.py::test_they_stand_where_the_list_says_and_nowhere_else": (
        "tests/core/test_dangerous_calls.py::test_each_would_be_noticed"
    ),
    "tests/core/test_reading_rules.py::test_files_become_values_in_one_place": (
        "tests/core/test_reading_rules.py::test_another_place_would_be_found"
    ),
    "tests/core/task/isolation/test_allowed.py::test_a_filter_that_lacks_the_entry_would_be_noticed": (
        "tests/core/task/isolation/test_allowed.py::test_what_tells_changes_or_takes_anything_is_refused"
    ),
    "tests/core/task/data/test_hostile_files.py::test_without_its_limits_a_bomb_takes_the_memory": (
        "tests/core/task/data/test_hostile_files.py::test_a_hostile_file_is_refused_in_words_or_read"
    ),
}
"""Rows whose test reads sources, or compiles them, or is a twin itself: the test that shows the other side."""
