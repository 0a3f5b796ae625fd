"""Errors that commands report in one line."""


class CommandError(RuntimeError):
    """What a run met and the user can mend, without being wrong in what was asked."""
