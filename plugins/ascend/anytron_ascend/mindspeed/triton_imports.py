"""Let MindSpeed's packages be imported without triton-ascend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.patches import Patch, Phase

if TYPE_CHECKING:
    from collections.abc import Callable

KERNELS = "Gated DeltaNet and other kernels for triton-ascend"


def triton_imports(patch_id: str, owner: str, *packages: str) -> Patch:
    """Make the patch.

    Args:
        patch_id: Its id.
        owner: Whose it is.
        packages: Packages that hold triton kernels, in the order in which they are imported.
    """

    def install() -> Callable[[], None]:
        from anytron_megatron.patches.triton_stand_in import install as install_finder

        return install_finder(dict.fromkeys(packages, KERNELS))

    return Patch(
        id=patch_id,
        owner=owner,
        target=packages[-1],
        phase=Phase.BEFORE_IMPORT,
        before="megatron.core",
        reason="it imports its triton kernels whether a model needs them or not; triton-ascend may not be there",
        upstream="mindspeed/features_manager/megatron_basic/requirements_basic.py, te_adaptation",
        remove_when="MindSpeed imports triton where it uses it",
        install=install,
    )
