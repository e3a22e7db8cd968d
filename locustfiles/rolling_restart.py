"""Rolling restart: requests go on while processes restart one by one.

    locust -f locustfiles/rolling_restart.py --host http://127.0.0.1:8000 --hosts http://127.0.0.1:8001 -u 100 -r 100

With further `--hosts`, a user goes on with the next host when its own is down, as behind a load
balancer. With one host, the failures show how long it was down.
"""

from connection import Connection
from load import MenuUser, Reader
from options import hosts_of


class Failover:
    """Connections to several hosts, of which one is in use."""

    def __init__(self, hosts: list[str], timeout: float) -> None:
        """Prepare a connection to each of *hosts*, with *timeout* in seconds."""
        self._connections = [Connection(host, timeout) for host in hosts]

    def get(self, path: str) -> tuple[int, int]:
        """Return the answer of the first host that is there, and stay with that one."""
        for _ in self._connections[1:]:
            try:
                return self._connections[0].get(path)
            except ConnectionError:
                self._connections.append(self._connections.pop(0))
        return self._connections[0].get(path)

    def close(self) -> None:
        """Disconnect from all hosts."""
        for connection in self._connections:
            connection.close()


class RollingRestart(MenuUser):
    """Asks a host that is up."""

    def connect(self) -> Reader:
        """Return a connection that goes on with the next host."""
        return Failover(hosts_of(self.environment), self.network_timeout)
