"""Every candidate behind one interface, each with its recommended settings."""

from importlib import import_module, util

from benchmarks.peers.peer import Peer

_MODULES = ("references", "guard", "memory", "services")
# The guard comes last, because the other modules import their packages only when they are used.
_LIGHTEST = ("references", "memory", "services", "guard")


def all_peers() -> dict[str, Peer]:
    """Return all candidates by name: baselines and references, the package, the others."""
    return {peer.name: peer for module in _MODULES for peer in import_module(f"benchmarks.peers.{module}").PEERS}


def named(name: str) -> Peer:
    """Return the candidate of that name, without importing the packages of others."""
    for module in _LIGHTEST:
        peers: tuple[Peer, ...] = import_module(f"benchmarks.peers.{module}").PEERS
        for peer in peers:
            if peer.name == name:
                return peer
    raise KeyError(name)


def is_installed(peer: Peer) -> bool:
    """Return whether *peer* can be measured here."""
    return all(util.find_spec(module) is not None for module in peer.imports)
