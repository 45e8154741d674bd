"""Kernels inside what ``torch.compile`` compiles, as Megatron's ``jit_fuser`` does on GPUs."""

from __future__ import annotations

import ast
import functools

import pytest
import torch

from anytron.kernels import fused
from tests.house import ROOT

PLACES = ("core", "backends", "plugins", "examples")
ROTATION = torch.linspace(-3, 3, 6 * 4).view(6, 1, 1, 4)


def returned_changed_in_place(source: str) -> list[str]:
    """Classes of autograd functions whose forward pass returns a tensor that it has changed in place.

    Compiled by torch 2.11, such a function has gradients of zero, silently: on an H100 all layers below a gated norm
    got none. In place in a view of the result does no harm.
    """
    found = []
    for cls in ast.walk(ast.parse(source)):
        if not isinstance(cls, ast.ClassDef) or not any("Function" in ast.unparse(base) for base in cls.bases):
            continue
        for forward in cls.body:
            if isinstance(forward, ast.FunctionDef) and forward.name == "forward":
                changed = {name for node in ast.walk(forward) for name in names_changed(node)}
                returned = [node.value for node in ast.walk(forward) if isinstance(node, ast.Return)]
                if any(set(parts(value)) & {*changed, IN_PLACE} for value in returned):
                    found.append(cls.name)
    return found


IN_PLACE = "a call in place"


def is_in_place(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    named = isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_") and not node.func.attr.endswith("__")
    return named or any(keyword.arg == "out" for keyword in node.keywords)


def names_changed(node: ast.AST) -> list[str]:
    """Names of tensors that a node changes in place, or binds to one that was: ``name.add_(1)``, ``name += 1``."""
    found: list[ast.expr] = []
    if isinstance(node, ast.AugAssign):
        found = [node.target]
    elif isinstance(node, ast.Assign) and is_in_place(node.value):
        found = node.targets
    elif isinstance(node, ast.Call) and is_in_place(node):
        found = [keyword.value for keyword in node.keywords if keyword.arg == "out"]
        found += [node.func.value] if isinstance(node.func, ast.Attribute) else []
    return [one.id for one in found if isinstance(one, ast.Name)]


def parts(value: ast.expr | None) -> list[str]:
    """What an expression may give: names, and calls in place."""
    if isinstance(value, ast.Tuple):
        return [part for one in value.elts for part in parts(one)]
    if isinstance(value, ast.IfExp):
        return parts(value.body) + parts(value.orelse)
    if isinstance(value, ast.Name):
        return [value.id]
    return [IN_PLACE] if value is not None and is_in_place(value) else []


def test_no_forward_pass_returns_what_it_has_changed_in_place():
    files = [file for place in PLACES for file in sorted((ROOT / place).rglob("*.py"))]
    found = {str(file.relative_to(ROOT)): returned_changed_in_place(file.read_text()) for file in files}
    assert not {file: classes for file, classes in found.items() if classes}


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ("return x.mul_(2)", True),
        ("y = x * 2; y.mul_(x); return y, x", True),
        ("y = (x * 2).add_(1); return y", True),
        ("y = x * 2; torch.mul(y, x, out=y); return y", True),
        ("y = x * 2; y += x; return y", True),
        ("y = x * 2; return None if ctx is None else y.mul_(x)", True),
        ("y = x * 2; first, second = y.chunk(2); first.mul_(second); return y", False),
        ("y = x.add_(1) * 2; return y", False),
        ("ctx.save_for_backward(x); return x * 2", False),
    ],
)
def test_what_the_rule_finds(body, wrong):
    source = f"class One(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        {body}\n"
    assert returned_changed_in_place(source) == ["One"] * wrong


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # both by torch's compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("kernel", "shapes"),
    [
        (functools.partial(fused.rms_norm, eps=1e-6, zero_centered=False), [(5, 8), (8,)]),
        (functools.partial(fused.rms_norm, eps=1e-6, zero_centered=True), [(5, 8), (8,)]),
        (fused.swiglu, [(5, 8)]),
        (functools.partial(fused.rope, freqs=ROTATION, interleaved=True), [(6, 2, 3, 8)]),
    ],
)
def test_a_compiled_kernel_has_the_same_gradients(kernel, shapes):
    operands = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for shape in shapes]

    def gated(*inputs):
        return kernel(*inputs) * 2

    expected = torch.autograd.grad(gated(*operands).square().sum(), operands)
    compiled = torch.compile(gated, backend="eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*operands).square().sum(), operands), expected)
