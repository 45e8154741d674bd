"""No function of torch that takes a device is forgotten: each is redirected, or stands here with the reason."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

OWNERS = {
    "torch": torch, "torch.Tensor": torch.Tensor, "torch._C._nn": torch._C._nn, "torch.fft": torch.fft,
    "torch.linalg": torch.linalg, "torch.nested": torch.nested, "torch.nn.functional": torch.nn.functional,
    "torch.signal.windows": torch.signal.windows, "torch.sparse": torch.sparse, "torch.special": torch.special,
}  # fmt: skip
STUBS = {
    "_VariableFunctions.pyi": ("torch", ""),
    "__init__.pyi": ("torch.Tensor", "TensorBase"),
    "_nn.pyi": ("torch._C._nn", ""),
}
"""Where torch writes the signatures of what is in C++: whose they are, and the class in the file."""
OF_OTHERS = {
    **dict.fromkeys(
        (f"torch.signal.windows.{name}" for name in torch.signal.windows.__all__),
        "written in Python: it calls torch.linspace and others, which are redirected",
    ),
    "torch.Event": "torch.accelerator's: who names CUDA there, where it is not, gets torch's error",
    "torch.Stream": "as torch.Event",
    "torch.GradScaler": "reads the device's type, and finds torch.cuda redirected",
    "torch.Tensor.ipu": "another vendor's",
    "torch.Tensor.is_pinned": "torch has deprecated its argument",
    "torch.Tensor.mtia": "another vendor's",
    "torch.Tensor.xpu": "another vendor's",
    "torch.from_file": "maps a file into the host's memory, and takes no other device",
    "torch.get_device_module": "gives torch.cuda, which is redirected",
    "torch.set_default_device": "makes a context of torch.utils._device, which is redirected",
}


def in_stubs():
    for file, (owner, cls) in STUBS.items():
        tree = ast.parse((Path(torch.__file__).parent / "_C" / file).read_text())
        body = next(node.body for node in tree.body if getattr(node, "name", "") == cls) if cls else tree.body
        for node in body:
            if isinstance(node, ast.FunctionDef):
                given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                if "device" in {one.arg for one in given}:
                    yield owner, node.name


def in_python():
    for owner, where in OWNERS.items():
        for name, one in inspect.getmembers(where, callable):
            try:
                takes = "device" in inspect.signature(one).parameters
            except (TypeError, ValueError):  # in C++
                takes = re.search(r"^ *device \(", str(one.__doc__), re.MULTILINE) is not None
            if takes:
                yield owner, name


def public(name):
    """Storages are left out: torch's legacy classes of them are the host's."""
    return name == "_parse_to" or not (name.startswith("_") or name.endswith("Storage"))


@pytest.fixture(scope="module")
def takers():
    return sorted({(owner, name) for owner, name in [*in_stubs(), *in_python()] if public(name)})


def held(owner, name):
    return inspect.getattr_static(OWNERS[owner], name)


def test_what_takes_a_device_is_redirected(takers, request):
    before = {one: held(*one) for one in takers}
    request.getfixturevalue("redirected")
    forgotten = {".".join(one) for one in takers if held(*one) is before[one]}
    assert len(takers) - len(forgotten) > 50
    assert forgotten == set(OF_OTHERS)


@pytest.mark.usefixtures("redirected")
def test_windows_are_made_on_the_platforms_device():
    assert torch.signal.windows.hann(4, device="cuda").device.type == "cpu"
