"""Every peer behind one shape, each with its best documented settings."""

from importlib import import_module, util

from benchmarks.peers.peer import Peer

_MODULES = ("references", "guard", "memory", "services")


def all_peers() -> dict[str, Peer]:
    """Return all candidates by their names: baselines and references first, then the package, then the others."""
    return {peer.name: peer for module in _MODULES for peer in import_module(f"benchmarks.peers.{module}").PEERS}


def is_installed(peer: Peer) -> bool:
    """Tell whether *peer* can be measured here."""
    return all(util.find_spec(module) is not None for module in peer.imports)
