"""Progress of long work: a bar on a terminal; in a file or a pipe, a line every half minute."""

import sys

from tqdm import tqdm


RARELY = 30  # seconds between lines where there is no terminal


class ByLines:
    """Standard error for tqdm, with each update on a separate line instead of overwriting the one before."""

    def write(self, text: str):
        if text.strip():
            sys.stderr.write(f"{text.strip()}\n")

    def flush(self):
        sys.stderr.flush()


def progress_bar(*args, **options) -> tqdm:
    """Return tqdm's bar on a terminal; if standard error is a file or a pipe, its text as a line every half minute."""
    if sys.stderr.isatty():
        return tqdm(*args, dynamic_ncols=True, **options)
    return tqdm(*args, file=ByLines(), mininterval=RARELY, maxinterval=RARELY, **options)
