"""The sockets on which `diloco.connect` listens."""

import os

from tests.processes import run_replicas
from tests.sockets import listening

import diloco


def addresses_of_a_replica() -> tuple[set[str], bool]:
    """The addresses on which this replica listens while it is connected, and whether replica 0's port is one."""
    port = int(os.environ["DILOCO_ADDRESS"].rpartition(":")[2])
    exchange = diloco.connect(f"127.0.0.2:{port}", timeout_seconds=20, num_connections=2)
    sockets = listening(os.getpid())
    assert exchange.num_replicas == 2, "it lives until here"
    return {str(address) for address, _ in sockets}, port in {port for _, port in sockets}


def test_connect_listens_on_the_interface_of_its_address_alone():
    (of_the_first, has_port), (of_the_second, _) = run_replicas(addresses_of_a_replica, 2, joined=False)
    assert of_the_first == {"127.0.0.2"} and has_port
    assert of_the_second <= {"127.0.0.1", "127.0.0.2"}, "the addresses of the same interface"
