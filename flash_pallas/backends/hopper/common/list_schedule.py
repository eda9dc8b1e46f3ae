"""The list schedule: which worker takes which tile, where what a tile costs is known beforehand."""

from __future__ import annotations

import heapq

import numpy as np


def list_schedule(costs: np.ndarray, workers: int) -> np.ndarray:
    """Assigns tiles in order, each to the worker that is free first, as a dynamic scheduler would.

    Returns int32[workers, longest + 3]: column 0 is the worker's number of tiles, then their
    numbers, then padding (a kernel reads up to two entries past the end).
    """
    free_at = [(0.0, worker) for worker in range(workers)]
    lists: list[list[int]] = [[] for _ in range(workers)]
    for tile, cost in enumerate(costs):
        time, worker = heapq.heappop(free_at)
        lists[worker].append(tile)
        heapq.heappush(free_at, (time + float(cost), worker))
    table = np.zeros((workers, max(map(len, lists)) + 3), np.int32)
    for worker, tiles in enumerate(lists):
        table[worker, 0] = len(tiles)
        table[worker, 1 : 1 + len(tiles)] = tiles
    return table
