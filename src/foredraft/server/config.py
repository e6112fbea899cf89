"""What a server was told at its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Defaults are those of `foredraft serve`."""

    model_names: tuple[str, ...]  # requests may use any of them; without one they mean the first
    api_keys: tuple[str, ...] = ()  # none: everybody may ask
    allowed_origins: tuple[str, ...] = ()  # of web pages that may ask, "*" for all (CORS)
    max_num_waiting: int = 256  # sequences in the queue
    max_body_bytes: int = 8 * 2**20
    max_completion_tokens: int | None = None  # of one choice; None: what the context holds
    stream_interval: int = 1  # tokens that a streamed event gathers at least
    stream_padding: int = 0  # bytes; a streamed event's size is a multiple of it
    share_prefix_cache: bool = False  # among API keys; never among different `cache_salt`s
    log_prompts: bool = False
