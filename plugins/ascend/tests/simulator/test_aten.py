"""aten on simulated devices: the host's results, on the device's memory, with the device's refusals."""

import pytest
import torch
from anytron_ascend_simulator import aten
from anytron_ascend_simulator.calls import DeviceMismatchError


def written_view(x, y):
    z = x.clone()
    z[1:, ::2] = y[1:, ::2]
    return z


OPERATIONS = {
    "add": lambda x, y: x + y,
    "matmul": lambda x, y: x @ y.T,
    "in place": lambda x, y: x.clone().mul_(y),
    "out": lambda x, y: torch.add(x, y, out=torch.empty_like(x)),
    "out resized": lambda x, y: torch.mm(x, y.T, out=x.new_empty(0)),
    "view then write": written_view,
    "reduction": lambda x, y: torch.stack([x.sum(), y.mean(), x.amax()]),
    "indexing": lambda x, y: x[y[:, 0] > 0],
    "index of the host": lambda x, y: x[torch.tensor([1, 0])],
    "index_put": lambda x, y: x.clone().index_put_((torch.tensor([0], device=x.device),), y[0]),
    "cat and split": lambda x, y: torch.cat(torch.cat([x, y]).split([1, 4, 1])),
    "softmax": lambda x, y: torch.softmax(x * y, -1),
    "transposed": lambda x, y: (x.T + y.T).contiguous(),
    "sort": lambda x, y: torch.cat([torch.sort(x, -1).values, torch.topk(y, 4).values]),
    "where": lambda x, y: torch.where(x > y, x, y),
    "scalar of the host": lambda x, y: x * torch.tensor(2.0) + y,
    "layer norm": lambda x, y: torch.nn.functional.layer_norm(x, (4,), y[0], y[1]),
    "foreach": lambda x, y: torch._foreach_add([x, y], 1.0)[1],
    "bfloat16": lambda x, y: (x.bfloat16() @ y.bfloat16().T).float(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients_are_the_hosts(name):
    results = []
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        inputs = [torch.randn(3, 4).to(device).requires_grad_("out" not in name) for _ in range(2)]
        value = OPERATIONS[name](*inputs)
        assert value.device.type == device
        gradients = ()
        if value.requires_grad:
            gradients = torch.autograd.grad(value.square().sum(), inputs, allow_unused=True)
        results.append([value.detach(), *(gradient for gradient in gradients if gradient is not None)])
    host, device = results
    assert len(host) == len(device)
    for expected, found in zip(host, device, strict=True):
        torch.testing.assert_close(found.cpu(), expected)


def test_integers_are_counted():
    values = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    counted = torch.histc(values.npu(), bins=4, min=0, max=3)
    assert (counted.dtype, counted.tolist()) == (torch.int32, [1, 0, 2, 1])


@pytest.mark.parametrize("pair", [("npu:0", "cpu"), ("cpu", "npu:0"), ("npu:0", "npu:1")])
def test_tensors_of_two_devices_are_refused(pair):
    one, other = (torch.ones(2, 2, device=device) for device in pair)
    with pytest.raises(DeviceMismatchError, match="at least two devices"):
        one @ other


def test_copies_between_devices_go_where_they_are_told():
    tensor = torch.arange(4.0, device="npu:0")
    moved = tensor.to("npu:1")
    assert moved.device == torch.device("npu", 1)
    assert moved.cpu().tolist() == tensor.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_seed_repeats_random_numbers():
    torch.npu.manual_seed(3)
    first = torch.rand(5, device="npu").cpu()
    torch.npu.manual_seed(3)
    assert torch.equal(torch.rand(5, device="npu").cpu(), first)


def test_a_saved_state_restores_random_numbers_and_the_hosts_are_left_alone():
    torch.manual_seed(0)
    host = torch.get_rng_state()
    state = torch.npu.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(64, device="npu")).cpu()
    second = torch.nn.functional.dropout(torch.ones(64, device="npu")).cpu()
    assert not torch.equal(first, second)
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(64, device="npu")).cpu(), first)
    assert torch.equal(torch.get_rng_state(), host)


def test_the_operators_are_the_simulators():
    before = aten.CALLS["aten.add.Tensor"]
    torch.ones(2, device="npu") + torch.ones(2, device="npu")
    assert aten.CALLS["aten.add.Tensor"] == before + 1


def test_streams_and_events_are_in_order():
    stream = torch.npu.Stream()
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    with torch.npu.stream(stream):
        start.record()
        value = torch.ones(8, device="npu") * 2
        end.record()
    torch.npu.current_stream().wait_stream(stream)
    end.synchronize()
    assert value.sum().item() == 16
    assert start.elapsed_time(end) >= 0
