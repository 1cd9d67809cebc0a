"""Whether the Hugging Face hub can be asked, found out quickly."""

from __future__ import annotations

__all__ = ["is_in_cache", "is_off", "why_unreachable"]

_SECONDS = 10.0


def is_off() -> str | None:
    """The setting that forbids asking the hub, or None."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE=1" if constants.HF_HUB_OFFLINE else None


def why_unreachable(model_id: str, revision: str | None = None) -> str | None:
    """Why nothing can be fetched from the hub now, or None when it answers, whatever it answers.

    One short request: the hub's own client tries again for half a minute and prints a warning each time. It goes
    through that client's session, so the user's proxy and endpoint hold.
    """
    from huggingface_hub import get_session, hf_hub_url

    if (setting := is_off()) is not None:
        return f"the hub was not asked ({setting})"
    try:
        get_session().head(hf_hub_url(model_id, "config.json", revision=revision), timeout=_SECONDS)
    except Exception as error:
        # Which class it is depends on the HTTP library that the hub's client was built with.
        return f"the hub cannot be reached ({type(error).__name__}: {error})"
    return None


def is_in_cache(model_id: str, revision: str | None = None) -> bool:
    """Whether an earlier download of this model is in the hub's own cache."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model_id, "config.json", revision=revision), str)
