"""The least that a user of Redis or Valkey has to be allowed, in one place."""

from typing import Final

# What every store needs. A script runs with the rights of whoever calls it, so what the scripts call is here too.
ASKED: Final = ("ping", "evalsha", "eval", "subscribe", "publish")
IN_SCRIPTS: Final = ("getrange", "pttl", "get", "set", "del", "append", "pexpire", "time")
# Not necessary, but without it each reconnection passes for a restart of the server, which costs some repetitions.
ADVISABLE: Final = ("info",)
# What only some need: with another database than 0, with `tracking=True`, with replicas, in a cluster.
WITH_DATABASE: Final = ("select",)
WITH_TRACKING: Final = ("client|id", "client|tracking")
WITH_REPLICAS: Final = ("role",)
IN_A_CLUSTER: Final = ("cluster|slots", "cluster|info", "readonly", "asking")
TRACKED: Final = "&__redis__:invalidate"  # a channel


def rule(namespace: str, *, without: str = "") -> list[str]:
    """Return the words that follow `ACL SETUSER <name>`, but for the password.

    Args:
        namespace: The guard's, or a glob pattern of several.
        without: A word to leave out.
    """
    core = (*ASKED, *IN_SCRIPTS, *ADVISABLE)
    commands = (*core, *WITH_DATABASE, *WITH_TRACKING, *WITH_REPLICAS, *IN_A_CLUSTER)
    places = ("resetkeys", f"~sg1:{{{namespace}:*", "resetchannels", f"&sg1:{namespace}:bus*", TRACKED)
    words = ("on", *places, "-@all", *(f"+{command}" for command in commands))
    return [word for word in words if word != without]
