"""Ranks on several machines meet at a port of one address, which is theirs from the moment in which it is chosen."""

import os
import resource
import socket
import threading
from datetime import timedelta

import pytest
from torch.distributed import rendezvous

from anytron.base.errors import ResourceError, WorkerError
from anytron.workers.executor.address import SCHEME, Stores, register
from anytron.workers.executor.base import interface_of, loopback_interface
from tests.core.workers.executor.processes import free_port, listeners

OURS, ANOTHER = "127.0.0.2", "127.0.0.3"
"""All of 127.0.0.0/8 are addresses of the loopback interface."""


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()


@pytest.fixture
def stores():
    made = Stores()
    yield made
    made.close()


def met(init_method):
    """The stores of two ranks that meet."""
    found = {}

    def meet(rank):
        found[rank], *whose = next(rendezvous(init_method, rank, 2, timeout=timedelta(seconds=30)))
        assert whose == [rank, 2]

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def answers(address, port):
    try:
        socket.create_connection((address, port), 5).close()
    except ConnectionRefusedError:
        return False
    return True


def reached_at(init_method):
    """Ranks meet and tell each other something; the addresses at which the store then listens and answers."""
    port = int(init_method.rpartition(":")[2])
    found = met(init_method)
    found[1].set("said", "by rank 1")
    assert found[0].get("said") == b"by rank 1"
    listening = {address for address, taken in listeners(os.getpid()) if taken == port}
    return listening, {address for address in (OURS, ANOTHER) if answers(address, port)}


@pytest.mark.parametrize("libuv", ["0", "1"])
def test_a_store_listens_at_its_address_and_at_no_other(stores, libuv, monkeypatch):
    monkeypatch.setenv("USE_LIBUV", libuv)
    assert reached_at(stores.new(OURS)) == ({OURS}, {OURS})


def test_one_that_listens_elsewhere_would_be_noticed():
    """torch's own way."""
    assert reached_at(f"tcp://{OURS}:{free_port()}") == ({"::"}, {OURS, ANOTHER})


def test_its_port_is_nobody_elses_until_then(stores):
    """Nor is it one that a connection gets."""
    port = int(stores.new(OURS).rpartition(":")[2])
    for address in (OURS, ""):
        for option in (None, socket.SO_REUSEADDR):
            with socket.socket() as other:
                if option is not None:
                    other.setsockopt(socket.SOL_SOCKET, option, 1)
                with pytest.raises(OSError, match="Address already in use"):
                    other.bind((address, port))
    assert not answers(OURS, port), "nobody listens yet"


def test_each_store_is_new_and_an_address_may_be_one_of_ipv6(stores):
    first, second, third = (stores.new(address) for address in (OURS, OURS, "::1"))
    assert first != second
    assert third.startswith(f"{SCHEME}://[::1]:")
    found = met(third)
    found[1].set("said", "by rank 1")
    assert found[0].get("said") == b"by rank 1"


def test_an_address_that_the_machine_lacks_is_an_error_that_says_so(stores):
    with pytest.raises(WorkerError, match=r"(?s)cannot listen at 192\.0\.2\.77.*requested address.*--node-ip-address"):
        stores.new("192.0.2.77")


def test_the_interface_of_an_address_is_found():
    assert interface_of("127.0.0.1") == loopback_interface() == "lo"
    assert interface_of("192.0.2.77") is None


@pytest.fixture
def no_descriptor_left():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # standard input, output and errors are open
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("address", [None, OURS])
def test_a_process_without_descriptors_is_told_so(address, stores, no_descriptor_left):
    with pytest.raises(ResourceError, match="Too many open files"):
        stores.new(address)
