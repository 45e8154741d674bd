"""Use the invented accelerator as torch shows it, and print what it does as JSON; "address" ends the process."""

import ctypes
import json
import sys

import torch
import torch_invented  # noqa: F401

if sys.argv[1:] == ["address"]:
    ctypes.string_at(torch.ones(4, device="invented").data_ptr(), 4)

found = {"device": str(torch.accelerator.current_accelerator()), "devices": torch.accelerator.device_count()}

stream, current = torch.Stream(device="invented:0"), torch.accelerator.current_stream()
tensor = torch.zeros(3, device="invented")
torch.accelerator.synchronize()
with stream:
    tensor.add_(1)
found["without a wait"] = tensor.clone().tolist()
current.wait_stream(stream)
found["after a wait"] = tensor.clone().tolist()

pinned = torch.zeros(3).pin_memory()
pinned.copy_(torch.ones(3, device="invented"), non_blocking=True)
found["pinned, early"] = pinned.tolist()
torch.accelerator.synchronize()
found["pinned, late"] = pinned.tolist()

late = torch.ones(3).pin_memory()
copy = late.to("invented", non_blocking=True)
late.fill_(7)
found["overwritten too early"] = copy.tolist()


def refused(function):
    try:
        function()
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


found["float64"] = refused(lambda: torch.ones(2, device="invented", dtype=torch.float64))
found["two devices"] = refused(lambda: torch.ones(2, device="invented:0") + torch.ones(2, device="invented:1"))
found["host and device"] = refused(lambda: torch.ones(2, device="invented") @ torch.ones(2))
found["a petabyte"] = refused(lambda: torch.empty(1 << 48, device="invented"))

torch.manual_seed(0)
first = torch.rand(4, device="invented")
on_host = torch.rand(4)
torch.manual_seed(0)
found["own random numbers"] = [torch.equal(torch.rand(4, device="invented"), first), torch.equal(first.cpu(), on_host)]
print(json.dumps(found))
