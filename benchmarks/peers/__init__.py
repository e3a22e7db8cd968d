"""Every peer behind one shape, each with its best documented settings."""

from importlib import import_module, util

from benchmarks.peers.peer import Peer

_MODULES = ("references", "guard", "memory", "services")
_LIGHTEST = ("references", "memory", "services", "guard")  # those before the last import what they need when it is used


def all_peers() -> dict[str, Peer]:
    """Return all candidates by their names: baselines and references first, then the package, then the others."""
    return {peer.name: peer for module in _MODULES for peer in import_module(f"benchmarks.peers.{module}").PEERS}


def named(name: str) -> Peer:
    """Return the candidate of that name; import nothing that another one needs."""
    for module in _LIGHTEST:
        peers: tuple[Peer, ...] = import_module(f"benchmarks.peers.{module}").PEERS
        for peer in peers:
            if peer.name == name:
                return peer
    raise KeyError(name)


def is_installed(peer: Peer) -> bool:
    """Tell whether *peer* can be measured here."""
    return all(util.find_spec(module) is not None for module in peer.imports)
