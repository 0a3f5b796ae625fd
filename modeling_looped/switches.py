"""Environment variables that switch a faster method off."""

import os


def is_switched_on(name: str, what: str) -> bool:
    value = os.environ.get(name, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{name}={value!r} is not known: choose 1, with {what}, or 0, without")
    return value == "1"
