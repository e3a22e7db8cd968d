"""The driver of the Redis store."""

from importlib import import_module

try:
    import_module("redis.maint_notifications")  # the youngest of the modules that are used
    from redis.exceptions import ResponseError as ResponseError
except ImportError as error:  # pragma: no cover  # the test environment has redis-py
    message = "a Redis store needs redis-py: pip install 'stampede-guard[redis]'"
    raise ImportError(message) from error
