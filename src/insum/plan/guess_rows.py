"""The first guess for rows of entries, short and long ones: how many rows a tile has, how many
entries of each are read at once, and where long rows are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from insum.lang.expr import Access, Call, Expr, Product, Sum, accesses, variables
from insum.plan.config import Config
from insum.plan.plan import Plan
from insum.plan.roles import contiguity
from insum.plan.sizes import WIDE_LOAD, power_of_two
from insum.plan.tiling import BYTES, SHORT, extent, most, sums_columns

#: Entries at which a long row is cut into pieces (of single numbers, which a warp sums at once, and
#: of more columns), and the length up to which rows are left whole.
SPLIT_ALONE, SPLIT_AT = 256, 128
LEAVE_WHOLE = 64
#: Below so many entries rows are left whole, for one launch is all that it is worth.
MANY_LAUNCHES = 4096
#: Below so many entries the device is not full of whole rows, and they are cut short.
FEW_ENTRIES, CUT_FEW = 2**18, 32
#: And shorter still below so many.
FEWER_ENTRIES, CUT_FEWER = 100_000, 16
#: Below so many, the device is nowhere near full, and waiting for one gather after the other is all
#: there is.
TINY_ENTRIES = 2**15
#: Columns up to which rows are narrow, entries from which on they are not short, and bytes that one
#: warp reads of such rows at once.
NARROW_ROW, SHORT_ROW, NARROW_BYTES = 32, 6, 4096
#: Rows of a tile that are no wider than this.
SHORTEST_ROWS = 16
#: Bytes of a tile of rows that hardly have entries.
SCARCE_BYTES = 2048
#: Numbers of a tile of rows that functions are computed of, and entries of a row in it: more would
#: take so many registers that too few programs run at once.
COMPUTED, COMPUTED_ENTRIES = 512, 4
#: Rows of a tile whose columns do not lie in memory, and the most entries that they may have.
ACROSS, SHORT_LINE = 128, 2**13
#: Values of a tile whose columns are read from places apart.
APART = 256
#: Columns of float32 up to which a warp has fewer rows, where every entry is written, too.
NARROW_READ = 16
#: Columns in tiles of which the last may be half empty.
MANY_COLUMNS = 512


def split_length(longest: int, entries: int, *, alone: bool = False) -> int:
    """Entries at which rows are cut; 0: rows stay whole, where they are even or the whole thing is
    small. ``alone``: they are single numbers.
    """
    if alone:
        return SPLIT_ALONE if longest > SPLIT_ALONE else 0
    if longest <= SHORT or entries < MANY_LAUNCHES:
        return 0
    if entries < FEW_ENTRIES:
        return CUT_FEWER if entries < FEWER_ENTRIES else CUT_FEW
    if longest <= LEAVE_WHOLE:
        return 0
    return SPLIT_AT


def for_rows(plan: Plan, extents: Mapping[str, int], *, long: bool) -> Config:
    """Tiles of several short rows, or of one long piece with many gathers in flight."""
    columns = extent(plan.roles.n, extents) if plan.roles.n else 1
    wide = row_bytes(plan) == 4
    summed = sums_columns(plan)
    if not summed and _lie_across(plan, extents):
        # rows of memory are those of the other axis: a few of them, which stay in the cache
        return Config(m=ACROSS, n=2, k=1, warps=4, stages=1)
    n = most(plan.roles.n, extents) if summed else _row_tile(columns, wide=wide)
    if plan.beside and not are_narrow(plan, extents, n):
        return _for_entries_beside(n, wide=wide, long=long)
    narrow = n > 1 and not summed and reads_narrow_rows(plan)
    if narrow:  # each load fetches little: of rows less at once, and of more of them
        n = min(n, 64)
    if n == 1:
        return _for_numbers(plan, extents, long=long)
    if long:
        m = min(max(1, 64 // n), power_of_two(extent(plan.roles.m[1:], extents)))
        k = max(min(16, 4096 // n), min(64, 2048 // (m * n)))
        if 1 < n <= 32:  # few lines of memory for each warp at a time
            k = max(16, min(128 if n <= 8 else 64, 4096 // (m * n * row_bytes(plan))))
        elif n > 1 and _computes(plan):
            k = max(1, min(k, 2 * COMPUTED // (m * n)))
        return Config(m=m, n=n, k=k, warps=1 if m * n <= 128 else 2, stages=1)
    if are_narrow(plan, extents, n):
        return _for_narrow_rows(plan, n)
    if n > NARROW_ROW and _computes(plan):
        m = max(1, COMPUTED // (COMPUTED_ENTRIES * n))
        return Config(m=m, n=n, k=COMPUTED_ENTRIES, warps=1, stages=1)
    m = max(1, min(64, 512 // n))
    if narrow:  # an index for each entry of each row takes registers
        m = min(m, SHORTEST_ROWS) if n <= SHORTEST_ROWS else m
        return Config(m=m, n=n, k=4, warps=1, stages=1)
    if n > 1 and _reads_columns_apart(plan):
        # threads lie along rows instead, so that what entries add up to would go through all warps
        return Config(m=max(1, APART // n), n=n, k=1, warps=1, stages=1)
    if columns % n and wide and n <= 32:  # few threads of a row have something to read
        return Config(m=max(1, m // 2), n=n, k=4, warps=1, stages=1)
    # where rows end inside of tiles, one warp waits for fewer threads that read nothing
    idle = columns % n > 0 and (n == 64 and not wide or n > 128)
    return Config(m=m, n=n, k=2, warps=1 if idle else 2, stages=1)


def _for_numbers(plan: Plan, extents: Mapping[str, int], *, long: bool) -> Config:
    """Sums of single numbers: a warp for a long row, and several threads for one of some length."""
    if long:
        return Config(m=1, n=1, k=SPLIT_ALONE, warps=1, stages=1)
    assert plan.segment is not None
    entries, rows = extents[plan.segment.var], max(1, extents[plan.segment.row])
    k = 16 if 2 * entries // rows > 16 else 1
    return Config(m=4 if k > 1 else 32, n=1, k=k, warps=1, stages=1)


def _for_entries_beside(n: int, *, wide: bool, long: bool) -> Config:
    """Rows of which every entry is written, too: a row of columns stays within one warp, which then
    brings what it writes together by itself.
    """
    m = max(1, (128 if wide and n <= NARROW_READ else 256) // n)
    if long:
        return Config(m=max(1, min(m, 64 // n)), n=n, k=8, warps=1, stages=1)
    few = n < 64 or n < 256 and not wide
    return Config(m=m, n=n, k=4 if few else 2, warps=1, stages=1)


def are_narrow(plan: Plan, extents: Mapping[str, int], n: int) -> bool:
    """Whether rows of few columns, which fill their tile, have entries enough to be read many at a
    time.
    """
    assert plan.segment is not None
    entries, rows = extents[plan.segment.var], max(1, extents[plan.segment.row])
    filled = n <= 8 or extent(plan.roles.n, extents) % n == 0
    narrow = 1 < n <= NARROW_ROW and len(plan.roles.m) == 1
    return narrow and filled and entries >= SHORT_ROW * rows


def _for_narrow_rows(plan: Plan, n: int) -> Config:
    """All entries of a short row at once, of as many rows as leave each thread of one warp some
    dozens of loads; of what is computed fewer, for threads then wait for arithmetic.
    """
    if _computes(plan):
        return Config(m=4 if n >= 16 else 8, n=n, k=COMPUTED_ENTRIES, warps=1, stages=1)
    k, read = 16 if n <= 8 else 8, (a for f in plan.factors for a in accesses(f, nested=False))
    gathered = sum(bool(a.indices) and a.indices[-1].var in plan.roles.n for a in read)
    row = n * k * row_bytes(plan) * power_of_two(max(1, gathered))
    return Config(m=max(1, min(32, NARROW_BYTES // row)), n=n, k=k, warps=1, stages=1)


def row_bytes(plan: Plan) -> int:
    """Bytes of the numbers that rows of columns are read in."""
    kinds = dict(plan.kinds)
    read = [
        BYTES.get(kinds[a.tensor], WIDE_LOAD)
        for f in plan.factors
        for a in accesses(f)
        if a.indices and a.indices[-1].var in plan.roles.n and a.tensor in kinds
    ]
    return max(read, default=4)


def _computes(plan: Plan) -> bool:
    """Whether functions are computed of what is read."""
    return any(map(_has_function, plan.factors))


def _has_function(expr: Expr) -> bool:
    match expr:
        case Call(function, args):
            return function not in ("whole", "conj") or any(map(_has_function, args))
        case Product(parts) | Sum(parts):
            return any(map(_has_function, parts))
    return False


def reads_narrow_rows(plan: Plan) -> bool:
    """Whether rows along N begin where no widest load may."""
    read = (a for f in plan.factors for a in accesses(f) if a.indices)
    return any(is_narrow_row(plan, a) for a in read if a.indices[-1].var in plan.roles.n)


def is_narrow_row(plan: Plan, read: Access) -> bool:
    """Whether rows of a tensor begin where no widest load may."""
    kinds, strides = dict(plan.kinds), dict(plan.strides)
    if len(read.indices) < 2 or read.tensor not in strides:
        return False
    size = BYTES.get(kinds[read.tensor], WIDE_LOAD)
    return any(-WIDE_LOAD < unit * size < 0 for unit in strides[read.tensor].units[:-1])


def _lie_across(plan: Plan, extents: Mapping[str, int]) -> bool:
    """Whether nothing lies along N, as where columns are scattered, and entries are so few that the
    rows of memory which they are gathered from are short.
    """
    assert plan.segment is not None
    written = plan.target.indices[-1].var if plan.target.indices else None
    along = written in plan.roles.n or any(contiguity(plan.factors, v) for v in plan.roles.n)
    few = extents[plan.segment.var] <= SHORT_LINE and extents[plan.segment.row] >= ACROSS
    return bool(plan.roles.n) and not along and few and len(plan.roles.m) == 1


def _reads_columns_apart(plan: Plan) -> bool:
    """Whether something is read along N that does not lie there, as the channels of vectors."""
    columns = {*plan.roles.n}
    reads = (a for f in plan.factors for a in accesses(f, nested=False) if a.indices)
    return any(columns & {*variables(a)} and a.indices[-1].var not in columns for a in reads)


def _row_tile(columns: int, *, wide: bool) -> int:
    """Columns of a tile of gathered rows: a wide tile has few rows in flight, and one that columns
    do not fill wastes threads. Rows of float32 that end inside of any tile are read whole.
    """
    n = min(128, power_of_two(columns))
    if n < 128 or columns % 128 == 0 or not 128 < columns < MANY_COLUMNS:
        return n
    return 256 if wide and columns % 32 and columns < 256 else 64


def are_scarce(plan: Plan, extents: Mapping[str, int]) -> bool:
    """Whether rows have an entry or none, most of them: filling them is what takes the time."""
    assert plan.segment is not None
    return extents[plan.segment.var] <= extents[plan.segment.row]


def for_scarce_rows(plan: Plan, guess: Config) -> Config:
    """One store of the widest kind, or a few, for each thread of a warp."""
    m = max(1, SCARCE_BYTES // (guess.n * row_bytes(plan)))
    return replace(guess, m=m, k=1, warps=1)


def for_few_rows(guess: Config) -> Config:
    """More gathers in flight, for lack of other programs to hide them behind."""
    n = min(guess.n, 64)
    return replace(guess, m=max(1, min(64, guess.m * guess.n // n)), n=n, k=8)


def for_cut_rows(guess: Config) -> Config:
    """Half the rows for half the warps: rows were cut into pieces of even length, and more programs
    than the device holds balance what is left.
    """
    return replace(guess, m=max(1, guess.m // 2), warps=1)


def for_short_pieces(short: Config) -> Config:
    """Pieces of rows that were cut short, in as few steps as registers allow."""
    k = max(1, min(CUT_FEWER, 1024 * short.warps // short.n))
    return replace(short, m=max(1, min(64, 512 * short.warps // (short.n * k))), k=k)
