"""Errors that commands report in one line."""


class CommandError(RuntimeError):
    """An error during a run that the user can fix, not caused by a wrong option or setting."""


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its kind if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
