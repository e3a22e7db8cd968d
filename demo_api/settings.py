"""What the service reads from its environment."""

from typing import Annotated, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

Mode = Literal["off", "aiocache", "on"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(BaseSettings):
    """One environment variable per field, named as the field is, in capitals."""

    # The URLs carry passwords, which neither a repr nor an error may show.
    model_config = SettingsConfigDict(frozen=True, hide_input_in_errors=True)

    guard: Mode = "on"
    database_url: Annotated[str, Field(repr=False)] = "postgresql://postgres@localhost:5432/postgres"
    redis_url: Annotated[str, Field(repr=False)] = "redis://localhost:6379/0"
    namespace: Annotated[str, Field(min_length=1)] = "menus"
    l1_ttl: Seconds = 5.0
    l2_ttl: Seconds = 10.0
    stale: Seconds | None = None
    stale_if_error: Seconds | None = None
    http_caching: bool = True
    lease: bool = True
    ceiling_first: bool = False
    pool_size: Annotated[int, Field(ge=1)] = 10
    workers: Annotated[int, Field(ge=1)] = 1
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000

    @field_validator("redis_url")
    @classmethod
    def _is_for_aiocache(cls, url: str, others: ValidationInfo) -> str:
        if others.data.get("guard") == "aiocache" and ("+" in url.partition(":")[0] or "," in url):
            message = "aiocache knows a single server: redis://host:6379/0"
            raise ValueError(message)
        return url


def explain(error: ValidationError) -> str:
    """Return *error* as one line per environment variable, without the values of the URLs."""
    lines: list[str] = []
    for problem in error.errors(include_url=False, include_context=False):
        variable = ".".join(map(str, problem["loc"])).upper()
        value = "" if variable.endswith("_URL") else f"={problem['input']!r}"
        lines.append(f"{variable}{value}: {problem['msg']}")
    return "\n".join(lines)
