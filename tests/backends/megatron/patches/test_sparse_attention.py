"""The indexer's rotation in torch is the Hadamard matrix's, and takes the place of the one that needs an extension."""

from importlib.util import find_spec

import pytest
import torch

from anytron.device.patches.plan import in_range, installed_version
from anytron_megatron.patches.sparse_attention import hadamard_transform

MEGATRON = installed_version("megatron-core")


def matrix(width):
    """float64 ``[D, D]``: entry (i, j) is 1 if i and j have an even number of bits in common, else -1; normalised."""
    rows = [[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
    return torch.tensor(rows, dtype=torch.float64) / width**0.5


def whole_numbers(width, dtype):
    generator = torch.Generator().manual_seed(width)
    return torch.randint(-8, 9, (3, 2, width), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 4, 16, 64])  # of which the root is exact
def test_it_is_the_product_with_the_matrix_bit_for_bit(width, dtype):
    x = whole_numbers(width, dtype)
    expected = (x.double() @ matrix(width)).to(dtype)
    assert torch.equal(hadamard_transform(x), expected)
    assert not torch.equal(hadamard_transform(-x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_heads_are_rounded_once(dtype):
    x = torch.randn(5, 3, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = x.double() @ matrix(128)
    allowed = 2 * torch.finfo(dtype).eps * expected.abs() + 1e-6
    assert ((hadamard_transform(x).double() - expected).abs() <= allowed).all()


def test_dot_products_stay_and_twice_is_the_identity():
    q, k = torch.randn(2, 7, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rotated = hadamard_transform(q), hadamard_transform(k)
    torch.testing.assert_close(rotated[0] @ rotated[1].T, q @ k.T)
    torch.testing.assert_close(hadamard_transform(rotated[0]), q)


def test_its_gradient_is_its_own():
    x = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    assert torch.autograd.gradcheck(hadamard_transform, x)


@pytest.mark.parametrize("width", [0, 3, 96])
def test_other_widths_are_refused(width):
    with pytest.raises(ValueError, match=f"a power of two of entries, not {width}"):
        hadamard_transform(torch.zeros(2, width))


@pytest.mark.mcore
@pytest.mark.skipif(not in_range(MEGATRON, ">=0.16"), reason="earlier versions have no sparse attention")
def test_the_patch_rotates_where_megatron_needs_an_extension_and_bfloat16(run_program):
    facts = run_program("sparse_rotation.py")
    assert "only support bf16" in facts["unpatched"][0]
    if find_spec("fast_hadamard_transform") is None:
        assert "fast_hadamard_transform is not installed" in facts["unpatched"][1]
    assert facts["record"]["outcome"] == "applied"
    up = torch.arange(1.0, 17.0, dtype=torch.float64)
    expected = torch.stack((up, up.flip(0))) @ matrix(16)
    assert facts["patched"] == [expected.to(dtype).tolist() for dtype in (torch.float32, torch.bfloat16)]
