import threading

import pytest
import torch

from anytron_megatron.redirect import redirect_torch_cuda


@pytest.mark.usefixtures("redirected")
def test_streams_and_events_are_classes():
    def annotated(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None): ...

    assert isinstance(torch.cuda.Stream(), torch.cuda.Stream)
    assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
    assert isinstance(torch.cuda.Stream().record_event(), torch.cuda.Event)


@pytest.mark.usefixtures("redirected")
def test_the_current_stream_is_the_one_entered_in_this_thread():
    side, seen = torch.cuda.Stream(), []
    default = torch.cuda.default_stream()
    with torch.cuda.stream(side):
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
        assert torch.cuda.current_stream() is side
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() is side
    assert torch.cuda.current_stream() is default
    assert seen == [default]


@pytest.mark.usefixtures("redirected")
def test_events_of_an_in_order_device_measure_the_hosts_time():
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(ValueError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    end.record()
    assert start.query()
    end.synchronize()
    torch.cuda.current_stream().wait_event(start)
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    assert 0 <= start.elapsed_time(end) < 1000


class NativeStream:
    """A stream that writes down what happens, with the interface of torch.Stream."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def __enter__(self):
        self.log.append(f"enter {self.name}")

    def __exit__(self, *_):
        self.log.append(f"exit {self.name}")

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for event {event}")

    def record_event(self):
        return f"of {self.name}"


def test_a_runtime_with_streams_gets_every_call(runtime):
    log, names = [], iter("abc")

    class Streaming(type(runtime)):
        def new_stream(self):
            return NativeStream(next(names), log)

        def current_stream(self):
            return NativeStream("default", log)

    undo = redirect_torch_cuda(Streaming())
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            event = torch.cuda.Event()
            event.record()
        torch.cuda.current_stream().wait_event(event)
    finally:
        undo()
    name = stream.native.name
    assert log == [
        f"enter {name}", f"{name} waits for default", f"exit {name}", f"default waits for event of {name}",
    ]  # fmt: skip
