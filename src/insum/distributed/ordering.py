"""Reverse Cuthill-McKee: an order of rows in which neighbours lie close together, so that few rows
have a neighbour on another rank.

Level by level, all connected parts of the graph at once, with whole-array operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from insum.distributed.cover import Flags, RowNumbers


@dataclass(frozen=True, eq=False)
class Neighbours:
    """A symmetric pattern without its diagonal, sorted by row."""

    pointers: RowNumbers
    columns: RowNumbers

    @property
    def nodes(self) -> int:
        return len(self.pointers) - 1

    @property
    def degrees(self) -> RowNumbers:
        found: RowNumbers = np.diff(self.pointers)
        return found

    def of(self, front: RowNumbers) -> tuple[RowNumbers, RowNumbers]:
        """The neighbours of some nodes, and for each the place in ``front`` that it is one of."""
        counts = self.degrees[front]
        parent = np.repeat(np.arange(len(front)), counts)
        inside = np.arange(len(parent)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.columns[self.pointers[front][parent] + inside], parent


def symmetric(rows: RowNumbers, columns: RowNumbers, nodes: int) -> Neighbours:
    """Who is whose neighbour, in either direction."""
    apart = rows != columns
    here, there = rows[apart].astype(np.int64), columns[apart].astype(np.int64)
    both = np.sort(np.concatenate([here * nodes + there, there * nodes + here]))
    both = both[np.diff(both, prepend=-1) > 0]
    row = both // nodes
    pointers = np.searchsorted(row, np.arange(nodes + 1))
    return Neighbours(pointers, both - row * nodes)


def reverse_cuthill_mckee(rows: RowNumbers, columns: RowNumbers, nodes: int) -> RowNumbers:
    """An order of nodes, as the old number at each new place.

    Each connected part begins at a node that is far from others (found by walking from one of
    smallest degree to the end and again), and goes on from neighbours to neighbours, those of an
    earlier node first, those with fewer neighbours first.

    >>> path = np.array([[0, 3], [3, 1], [1, 4], [4, 2]])
    >>> reverse_cuthill_mckee(path[:, 0], path[:, 1], 5).tolist()
    [2, 4, 1, 3, 0]
    """
    graph = symmetric(rows, columns, nodes)
    part = parts_of(graph)
    starts = _far_away(graph, part, _least(graph.degrees, part))
    place, _ = _walked(graph, starts)
    # parts one behind the other, the order of the walk inside of each
    rank_of_part = np.empty(nodes, dtype=np.int64)
    rank_of_part[part[starts]] = np.arange(len(starts))
    found: RowNumbers = np.lexsort((place, rank_of_part[part]))[::-1].copy()
    return found


def parts_of(graph: Neighbours) -> RowNumbers:
    """The smallest node that each node is connected with.

    >>> parts_of(symmetric(np.array([0, 3]), np.array([2, 1]), 4)).tolist()
    [0, 1, 0, 1]
    """
    label = np.arange(graph.nodes)
    here = np.repeat(label, graph.degrees)
    while len(here):
        before = label.copy()
        np.minimum.at(label, label[here], label[graph.columns])
        label = label[label]
        if np.array_equal(label, before):
            break
    return label


def _least(key: RowNumbers, part: RowNumbers) -> RowNumbers:
    """A node of smallest key of each part, the parts in the order of these keys."""
    order = np.lexsort((key, part))
    first = order[np.flatnonzero(np.diff(part[order], prepend=-1))]
    found: RowNumbers = first[np.argsort(key[first], kind="stable")]
    return found


def _far_away(graph: Neighbours, part: RowNumbers, starts: RowNumbers) -> RowNumbers:
    """Starts from which walks are longest, as far as two walks tell."""
    for _ in range(2):
        _, depth = _walked(graph, starts)
        last = _least(-depth * (graph.nodes + 1) + graph.degrees, part)
        by_part = np.empty(graph.nodes, dtype=np.int64)
        by_part[part[last]] = last
        starts = by_part[part[starts]]
    return starts


def _walked(graph: Neighbours, starts: RowNumbers) -> tuple[RowNumbers, RowNumbers]:
    """The place of each node in the order in which it is met, and the number of steps to it."""
    place, depth = (np.full(graph.nodes, -1) for _ in range(2))
    met: Flags = np.zeros(graph.nodes, dtype=bool)
    degrees, front, count, step = graph.degrees, starts, 0, 0
    while len(front):
        met[front] = True
        place[front], depth[front] = np.arange(count, count + len(front)), step
        count, step = count + len(front), step + 1
        found, parent = graph.of(front)
        fresh = ~met[found]
        found, parent = found[fresh], parent[fresh]
        _, first = np.unique(found, return_index=True)  # its first parent is the earliest
        found, parent = found[first], parent[first]
        front = found[np.lexsort((found, degrees[found], parent))]
    return place, depth
