"""Functions of tests under names by which patches can find them."""

import sys
from itertools import count
from types import ModuleType

_module = ModuleType("functions_of_tests")
_numbers = count()


def named(function):
    """Give a function a name of the form ``module:function``."""
    sys.modules[_module.__name__] = _module
    name = f"function_{next(_numbers)}"
    setattr(_module, name, function)
    return f"{_module.__name__}:{name}"
