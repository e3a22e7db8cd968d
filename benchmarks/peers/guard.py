"""The package itself, through its public names."""

from contextlib import asynccontextmanager

from benchmarks.peers.peer import Peer, Wrapped
from benchmarks.subjects import Subject, Terms
from stampede_guard import Guard, coalesce

NAMESPACE = "benchmarks"


@asynccontextmanager
async def templated(subject: Subject, terms: Terms) -> Wrapped:
    """With a key template, as its documentation does."""
    async with Guard(terms.url or None, namespace=NAMESPACE, maxsize=terms.maxsize) as guard:
        # With a store, no value stays in memory, because the store is measured.
        life, life_in_redis = (None, terms.ttl) if terms.url else (terms.ttl, None)
        yield coalesce(subject.template, guard=guard, ttl=life, l2_ttl=life_in_redis)(subject.function)


@asynccontextmanager
async def derived(subject: Subject, terms: Terms) -> Wrapped:
    """With a key derived from all arguments, as most of the others do."""
    async with Guard(namespace=NAMESPACE, maxsize=terms.maxsize) as guard:
        yield coalesce(guard=guard, ttl=terms.ttl)(subject.function)


TEMPLATED = Peer("stampede_guard", templated, distribution="stampede-guard", has_redis=True, role="guard")
DERIVED = Peer("stampede_guard, derived key", derived, distribution="stampede-guard", role="guard")

PEERS = (TEMPLATED, DERIVED)
