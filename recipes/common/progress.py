"""How far a long piece of work is: a bar on a terminal, now and then a line in a file."""

import sys

from tqdm import tqdm


RARELY = 30  # seconds between lines of a file


class ByLines:
    """Standard error, on which what tqdm would write over another time is a line of its own."""

    def write(self, text: str):
        if text.strip():
            sys.stderr.write(f"{text.strip()}\n")

    def flush(self):
        sys.stderr.flush()


def progress_bar(*args, **options) -> tqdm:
    """As tqdm; where nobody sees it move, in a file or a pipe, it tells how far it is every half minute."""
    if sys.stderr.isatty():
        return tqdm(*args, dynamic_ncols=True, **options)
    return tqdm(*args, file=ByLines(), mininterval=RARELY, maxinterval=RARELY, **options)
