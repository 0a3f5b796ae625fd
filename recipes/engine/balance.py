"""Which rows each process takes, so that none waits for the deepest."""

from collections.abc import Sequence
from heapq import heappop, heappush


def balanced_ranks(depths: Sequence[int], num_processes: int) -> list[list[int]]:
    """Which rows each process takes: equally many, and about equally many loops.

    The deepest row left goes to the process with the fewest loops among those that have room. A process gets its rows
    deepest first, so that rows of one micro-batch have similar depths, here and on the other processes.
    """
    if len(depths) % num_processes:
        raise ValueError(
            f"{len(depths)} rows cannot be split evenly over {num_processes} processes: choose a number of rows per "
            f"step that is a multiple of {num_processes}"
        )
    room = len(depths) // num_processes
    ranks = [[] for _ in range(num_processes)]
    with_room = [(0, rank) for rank in range(num_processes)]  # (loops, rank), a heap
    for row in sorted(range(len(depths)), key=lambda row: (-depths[row], row)):
        loops, rank = heappop(with_room)
        ranks[rank].append(row)
        if len(ranks[rank]) < room:
            heappush(with_room, (loops + depths[row], rank))
    return ranks
