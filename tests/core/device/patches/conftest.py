import sys
from types import ModuleType

import pytest

SOURCE = """
def greet():
    return "hello"

def part():
    return "goodbye"

class Shop:
    open = 9

    def sell(self):
        return "bread"

    @staticmethod
    def address():
        return "High Street"

    @classmethod
    def kind(cls):
        return cls.__name__

class Bakery(Shop):
    pass
"""


@pytest.fixture
def victim():
    """A loaded third-party package ``victim`` with a module, and one that imports from it by name."""
    package, importer = ModuleType("victim"), ModuleType("victims_friend")
    exec(SOURCE, vars(package))
    importer.greet_by_name = package.greet
    sys.modules |= {"victim": package, "victims_friend": importer}
    yield package
    del sys.modules["victim"], sys.modules["victims_friend"]
