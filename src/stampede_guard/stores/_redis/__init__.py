"""The driver of the Redis store."""

try:
    import redis.maint_notifications  # noqa: F401  # the youngest of the modules that are used
except ImportError as error:  # pragma: no cover  # the test environment has redis-py
    message = "a Redis store needs redis-py: pip install 'stampede-guard[redis]'"
    raise ImportError(message) from error
