"""A torchvision whose C++ operators do not load: with the two declared that its import cannot do without.

PyPI's torchvision is built for CUDA, and the tests' torch for processors. What vLLM and ms-swift use of it to read
pictures is written in Python. This package is found before that one, and becomes it.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch

_here = Path(__file__).parents[1]
_spec = PathFinder.find_spec("torchvision", [entry for entry in sys.path if Path(entry) != _here])
assert _spec is not None
assert _spec.submodule_search_locations is not None
assert _spec.loader is not None

_operators = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
__path__ = list(_spec.submodule_search_locations)
_spec.loader.exec_module(sys.modules[__name__])
