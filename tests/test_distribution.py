"""How tests are distributed over processes."""

from collections import OrderedDict
from unittest.mock import Mock

from tests.distribution import LONG, FilesAndRanks
from tests.house import ROOT


class Scheduling(FilesAndRanks):
    """One whose processes take all work at once."""

    def __init__(self, *scopes):
        self.workqueue = OrderedDict((scope, {}) for scope in scopes)

    def taken(self):
        """The scopes in the order in which one process takes them."""
        node = Mock()
        self.assigned_work, self.registered_collections = {node: OrderedDict()}, {node: []}
        taken = []
        while self.workqueue:
            before = list(self.workqueue)
            self._assign_work_unit(node)
            taken += [scope for scope in before if scope not in self.workqueue]
        return taken


def test_ranks_and_long_files_begin_first_and_the_others_keep_their_order():
    assert Scheduling("a.py", LONG[2], "b.py", "ranks", LONG[0]).taken() == ["ranks", LONG[0], LONG[2], "a.py", "b.py"]
    assert Scheduling("b.py", "a.py").taken() == ["b.py", "a.py"]


def test_the_long_files_are_there():
    assert [file for file in LONG if not (ROOT / file).is_file()] == []
