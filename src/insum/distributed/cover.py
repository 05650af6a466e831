"""What travels between two ranks: rows of the dense factor, or rows of the result.

A nonzero ``A[m,k]`` whose row is one rank's and whose column another's is worth something to the
row's owner once either row ``k`` of the dense factor has travelled one way, or the sum over all
such nonzeros of row ``m``, taken by the column's owner, the other. The fewest rows that serve every
nonzero are a minimum vertex cover of the bipartite graph between rows and columns, which a maximum
matching gives (Koenig).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

RowNumbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Flags: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"


def minimum_cover(rows: RowNumbers, columns: RowNumbers) -> tuple[Flags, Flags]:
    """The rows and the columns of a smallest cover of the pairs ``(rows[e], columns[e])``, as flags
    over all numbers up to the largest.

    >>> in_rows, in_columns = minimum_cover(np.array([0, 0, 0, 1]), np.array([0, 1, 2, 2]))
    >>> int(in_rows.sum() + in_columns.sum())
    2
    """
    graph = _Bipartite(columns, rows)  # so that of two equal covers the one with columns is found
    reached_columns, reached_rows = graph.reached(graph.matching())
    return reached_rows, ~reached_columns & (graph.degrees > 0)


class _Bipartite:
    """Pairs, sorted by row."""

    def __init__(self, rows: RowNumbers, columns: RowNumbers) -> None:
        order = np.argsort(rows, kind="stable")
        self.row_count = int(rows.max()) + 1 if len(rows) else 0
        self.column_count = int(columns.max()) + 1 if len(columns) else 0
        self.degrees = np.bincount(rows, minlength=self.row_count)
        self.pointers = np.concatenate([[0], np.cumsum(self.degrees)])
        self.columns = columns[order]

    def matching(self) -> RowNumbers:
        """For each row the column that it is matched with, or -1."""
        try:
            from scipy.sparse import csr_array
            from scipy.sparse.csgraph import maximum_bipartite_matching
        except ImportError:
            return own_matching(self.pointers, self.columns, self.column_count)
        shape = self.row_count, self.column_count
        if 0 in shape:
            return np.full(self.row_count, -1)
        ones = np.ones(len(self.columns), dtype=np.int8)
        graph = csr_array((ones, self.columns, self.pointers), shape=shape)
        found: RowNumbers = maximum_bipartite_matching(graph, perm_type="column").astype(np.int64)
        return found

    def reached(self, partner: RowNumbers) -> tuple[Flags, Flags]:
        """What alternating paths from rows without a partner reach."""
        rows = (partner < 0) & (self.degrees > 0)
        columns = np.zeros(self.column_count, dtype=bool)
        partner_of = np.full(self.column_count, -1)
        matched = np.flatnonzero(partner >= 0)
        partner_of[partner[matched]] = matched
        front = np.flatnonzero(rows)
        while len(front):
            fresh = np.zeros(self.column_count, dtype=bool)
            fresh[self._columns_of(front)] = True
            met = np.flatnonzero(fresh & ~columns)
            columns[met] = True
            # every column that is met has a partner, or the matching could grow
            front = partner_of[met]
            front = front[~rows[front]]
            rows[front] = True
        return rows, columns

    def _columns_of(self, rows: RowNumbers) -> RowNumbers:
        counts = self.degrees[rows]
        starts = np.repeat(self.pointers[rows] - (np.cumsum(counts) - counts), counts)
        return self.columns[starts + np.arange(len(starts))]


def own_matching(pointers: RowNumbers, columns: RowNumbers, column_count: int) -> RowNumbers:
    """A maximum matching (Hopcroft and Karp): for each row its column, or -1.

    >>> own_matching(np.array([0, 2, 3]), np.array([0, 1, 0]), 2).tolist()
    [1, 0]
    """
    bounds, ends = pointers.tolist(), columns.tolist()
    of_row, of_column = _greedy(bounds, ends, column_count)
    while True:
        depth = _depths(bounds, ends, of_row, of_column)
        # a row goes on from the place where it was left: no pair is looked at twice in a phase
        places = bounds[:-1]
        free = [row for row, column in enumerate(of_row) if column < 0]
        grown = [_augment(r, bounds, ends, of_row, of_column, depth, places) for r in free]
        if not any(grown):
            return np.array(of_row, dtype=np.int64)


def _greedy(bounds: list[int], ends: list[int], column_count: int) -> tuple[list[int], list[int]]:
    of_row, of_column = [-1] * (len(bounds) - 1), [-1] * column_count
    for row, start in enumerate(bounds[:-1]):
        for column in ends[start : bounds[row + 1]]:
            if of_column[column] < 0:
                of_row[row], of_column[column] = column, row
                break
    return of_row, of_column


def _depths(
    bounds: list[int], ends: list[int], of_row: list[int], of_column: list[int]
) -> list[int]:
    """How many rows lie on the shortest alternating path to each row; -1 beyond the first depth at
    which a free column is met.
    """
    depth = [0 if column < 0 else -1 for column in of_row]
    front = [row for row, column in enumerate(of_row) if column < 0]
    while front:
        after, found = [], False
        for row in front:
            for column in ends[bounds[row] : bounds[row + 1]]:
                other = of_column[column]
                if other < 0:
                    found = True
                elif depth[other] < 0:
                    depth[other] = depth[row] + 1
                    after.append(other)
        front = [] if found else after
    return depth


def _augment(
    first: int,
    bounds: list[int],
    ends: list[int],
    of_row: list[int],
    of_column: list[int],
    depth: list[int],
    places: list[int],
) -> bool:
    """Follow one shortest path from a free row to a free column, without recursion, and turn it."""
    path = [first]
    while path:
        row = path[-1]
        if places[row] == bounds[row + 1]:
            path.pop()
            if path:
                places[path[-1]] += 1
            continue
        other = of_column[ends[places[row]]]
        if other < 0:
            for step in path:
                column = ends[places[step]]
                of_row[step], of_column[column] = column, step
                places[step] += 1
            return True
        if depth[other] == depth[row] + 1:
            path.append(other)
        else:
            places[row] += 1
    return False
