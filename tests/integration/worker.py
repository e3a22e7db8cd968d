"""A process of its own: answers one call over the store, and prints the answer and how it came by it."""

import asyncio
import json
import sys

from stampede_guard import Guard, coalesce


async def main(url: str, namespace: str, answer: str) -> None:
    """Print what the call returned and how many loads this process ran."""
    guard = Guard(url, namespace=namespace, deadline=5, connect_timeout=5)

    @coalesce("menu-{menu_id}", guard=guard, ttl=5, l2_ttl=60)
    async def load_menu(menu_id: int) -> dict[str, str]:
        return {"loaded by": answer}

    async with guard:
        menu = await load_menu(7)
        sys.stdout.write(json.dumps({"menu": menu, "loads": guard.stats().loads}))


asyncio.run(main(*sys.argv[1:]))
