"""Errors that commands report in one line."""


class CommandError(RuntimeError):
    """An error during a run that the user can fix, not caused by a wrong option or setting."""
