"""Weights through shared memory arrive bit for bit or not at all, and nothing is left behind, whatever dies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anytron.engines import weight_stream
from anytron.engines.weight_buckets import Bucket
from anytron.engines.weight_stream import StreamedWeights, WeightStream
from anytron.errors import EngineError, TransferError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def collect(origin):
    """Put tensors together from their pieces, as raw bytes: name -> (dtype, shape, optional, bytes)."""
    found = {}
    with origin.open() as weights:
        for piece in weights:
            values = bits(piece.values).clone()
            if piece.name not in found:
                assert piece.start == 0
                found[piece.name] = (piece.values.dtype, piece.shape, piece.optional, values)
            else:
                *_, before = found[piece.name]
                assert piece.start == len(before) // piece.values.element_size()
                found[piece.name] = (*found[piece.name][:3], torch.cat([before, values]))
        return weights.version, found


def transfer(stream, weights, version=3, is_optional=lambda name: False):
    """Send and receive in threads of this process; return what each reader found, or raise the sender's error."""
    with ThreadPoolExecutor() as pool:
        readers = [pool.submit(collect, stream.origin(number)) for number in range(stream.readers)]
        assert stream.send(weights, version, is_optional).version == version
        return [reader.result() for reader in readers]


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    numbers = torch.randint(0, 256, (int(torch.tensor(shape).prod()) * dtype.itemsize,), generator=generator)
    data = numbers.to(torch.uint8) if dtype is not torch.bool else numbers.to(torch.uint8) % 2
    tensor = data.view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


@given(st.lists(tensors(), max_size=12), st.integers(1, 8), st.integers(1, 2))
def test_any_tensors_arrive_bit_for_bit_in_buckets_of_any_size(tmp_path_factory, weights, units, readers):
    stream = WeightStream(str(tmp_path_factory.mktemp("stream") / "transfer"), readers, 30.0, 64 * units)
    named = {f"weight.{number}": tensor for number, tensor in enumerate(weights)}
    for version, found in transfer(stream, named.items(), is_optional=lambda name: name.endswith("1")):
        assert version == 3
        assert list(found) == list(named)
        for name, tensor in named.items():
            dtype, shape, optional, data = found[name]
            assert (dtype, shape, optional) == (tensor.dtype, tuple(tensor.shape), name.endswith("1"))
            assert torch.equal(data, bits(tensor))
    assert not Path(stream.path).exists()


def test_the_path_of_a_socket_may_be_long(stream):
    deep = stream(name="/".join(["deep"] * 40 + ["transfer"]))
    assert len(deep.path) > 200
    Path(deep.path).parent.mkdir(parents=True)
    assert transfer(deep, [("a", torch.ones(3))])[0][0] == 3


def test_a_damaged_bucket_is_refused(stream, monkeypatch):
    real, calls = Bucket.checksum, []

    def checksum(self, used):
        calls.append(used)
        if len(calls) == 4:  # each bucket is computed at both ends: this is the second, as it is received
            self.data[5] ^= 1
        return real(self, used)

    monkeypatch.setattr(Bucket, "checksum", checksum)
    whole = stream()
    with ThreadPoolExecutor() as pool:
        reader = pool.submit(collect, whole.origin(0))
        whole.send([("a", torch.ones(2000))], 3, lambda name: False)
        with pytest.raises(TransferError, match=r"(?s)damaged in transfer.*bucket 1, version 3.*XXH3"):
            reader.result()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda messages: messages.pop(0), "damaged in transfer"),
        (lambda messages: messages.pop(1), "Weights are missing"),
        (lambda messages: messages[1]["entries"].pop(), "missing"),
        (lambda messages: messages[0]["entries"].append(messages[0]["entries"][0]), "missing or came twice"),
        (lambda messages: messages[-1].update(tensors=3), "Weights are missing"),
    ],
    ids=["a-bucket", "the-last-bucket", "an-entry", "an-entry-twice", "a-tensor"],
)
def test_what_is_not_told_of_is_noticed(stream, monkeypatch, spoil, message):
    """A saboteur in the sender changes the tables of buckets."""
    real, held = weight_stream._send, []

    def send(connection, message):
        if "reader" in message or "version" in message:
            real(connection, message)
        elif "done" not in message:
            held.append(message)
        if "tensors" in message:
            spoil(held)
            for one in held:
                real(connection, one)

    monkeypatch.setattr(weight_stream, "_send", send)
    monkeypatch.setattr(weight_stream._Sender, "_await", lambda self, number: None)
    whole = stream()
    with ThreadPoolExecutor() as pool:
        reader = pool.submit(collect, whole.origin(0))
        whole.send([("a", torch.ones(1000)), ("b", torch.ones(500))], 3, lambda name: False)
        with pytest.raises(TransferError, match=message):
            reader.result()


def test_a_name_that_comes_twice_is_refused_by_the_sender(stream):
    with ThreadPoolExecutor() as pool:
        whole = stream()
        reader = pool.submit(collect, whole.origin(0))
        with pytest.raises(EngineError, match=r"(?s)exported twice.*a, version 3"):
            whole.send([("a", torch.ones(2000)), ("a", torch.ones(2))], 3, lambda name: False)
        with pytest.raises(TransferError, match="ended before all had come"):
            reader.result()
    assert not Path(whole.path).exists()


@pytest.mark.parametrize("stands_after", ["0", "5"])
def test_a_killed_sender_is_an_error_at_its_readers_at_once(stream, start, stands_after):
    two = stream(readers=2)
    readers = [start(two, "receive", str(number)) for number in range(2)]
    sender = start(two, "send", "stand", stands_after)
    assert sender.stdout.readline() == "stands\n"
    if stands_after == "0":  # readers have nobody to connect to yet; the driver, which sees the death, ends them
        for reader in readers:
            assert reader.poll() is None
        return
    sender.kill()
    for reader in readers:
        assert reader.communicate(timeout=20)[0] == "TransferError: The weights ended before all had come.\n"


def test_a_killed_reader_costs_the_others_nothing(stream, start):
    three = stream(readers=3)
    readers = [start(three, "receive", str(number), *rest) for number, rest in enumerate([(), ("stand", "4"), ()])]
    sender = start(three, "send")
    assert readers[1].stdout.readline() == "stands\n"
    readers[1].kill()
    for process in (sender, readers[0], readers[2]):
        assert process.communicate(timeout=20)[0] == "version 7\n"
    assert not Path(three.path).exists()


def test_a_sender_does_not_wait_for_readers_that_were_withdrawn(stream, start):
    three = stream(readers=3)
    sender = start(three, "send")
    three.withdraw(2)
    reader = start(three, "receive", "0")
    three.withdraw(1)
    for process in (sender, reader):
        assert process.communicate(timeout=20)[0] == "version 7\n"


def test_a_sender_without_any_reader_still_takes_all_weights_from_the_ranks(stream):
    alone, taken = stream(), []

    def weights():
        for number in range(5):
            taken.append(number)
            yield str(number), torch.ones(2000)

    alone.withdraw(0)
    assert alone.send(weights(), 3, lambda name: False) == StreamedWeights(3, 5 * 8000)
    assert taken == [0, 1, 2, 3, 4]


def test_neither_end_waits_for_ever(stream):
    with pytest.raises(TransferError, match="Nobody sends weights"):
        collect(stream(timeout_s=0.1).origin(0))
    with pytest.raises(TransferError, match=r"(?s)does not come for its weights.*readers \[0, 1\] of 2"):
        stream(readers=2, timeout_s=0.1).send([], 3, lambda name: False)
