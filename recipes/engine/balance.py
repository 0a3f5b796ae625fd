"""Distribution of rows over processes, so that no process waits long for one with deeper rows."""

from collections.abc import Sequence
from heapq import heappop, heappush


def balanced_ranks(depths: Sequence[int], num_processes: int) -> list[list[int]]:
    """Assign rows to processes: each gets the same number of rows and about the same number of loops.

    The deepest remaining row goes to the process with the fewest loops among those that have room. Each process gets
    its deepest rows first, so that the rows of a micro-batch have similar depths, also across processes.
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
