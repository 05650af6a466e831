"""The figures of docs/how-it-works.md, drawn from objects of the library.

python docs/figures.py     write them into docs/pictures
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from insum.formats import COO, BlockGroupCOO, GroupCOO

PICTURES = Path(__file__).parent / "pictures"
#: Colours that can be read on white and on black: what is stored, what is padding, what moves.
GREY, STORED, PADDING, MOVING = "#808080", "#2a9d8f", "#b0b0b0", "#e76f51"
CELL = 22


class Drawing:
    """Lines of an SVG, put together from cells, boxes, words and arrows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker></defs>',
        ]

    def text(
        self, x: float, y: float, words: str, *, mono: bool = False, at: str = "start"
    ) -> None:
        family = "monospace" if mono else "sans-serif"
        self.lines.append(
            f'<text x="{x}" y="{y}" font-family="{family}" font-size="13" fill="{GREY}" '
            f'text-anchor="{at}">{html.escape(words)}</text>'
        )

    def cell(self, x: float, y: float, label: str, colour: str, wide: float = CELL) -> None:
        self.lines.append(
            f'<rect x="{x}" y="{y}" width="{wide}" height="{CELL}" fill="{colour}" '
            f'fill-opacity="{0.85 if colour != "none" else 1}" stroke="{GREY}"/>'
        )
        if label:
            ink = GREY if colour == "none" else "#ffffff"
            self.lines.append(
                f'<text x="{x + wide / 2}" y="{y + 15.5}" font-family="monospace" font-size="12" '
                f'fill="{ink}" text-anchor="middle">{html.escape(label)}</text>'
            )

    def grid(
        self, x: float, y: float, labels: Sequence[Sequence[str]], colours: Sequence[Sequence[str]]
    ) -> None:
        for i, (row, shades) in enumerate(zip(labels, colours)):
            for j, (label, colour) in enumerate(zip(row, shades)):
                self.cell(x + j * CELL, y + i * CELL, label, colour)

    def box(
        self,
        x: float,
        y: float,
        wide: float,
        high: float,
        words: Sequence[str],
        *,
        colour: str = "none",
    ) -> None:
        self.lines.append(
            f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="5" fill="{colour}" '
            f'fill-opacity="0.25" stroke="{GREY}"/>'
        )
        first = y + high / 2 + 5 - 9 * (len(words) - 1)
        for number, line in enumerate(words):
            self.text(x + wide / 2, first + 18 * number, line, mono=bool(number), at="middle")

    def arrow(self, x0: float, y0: float, x1: float, y1: float) -> None:
        self.lines.append(
            f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="{GREY}" '
            'stroke-width="1.5" marker-end="url(#tip)"/>'
        )

    def end(self) -> str:
        return "\n".join([*self.lines, "</svg>"]) + "\n"


def matrix() -> Tensor:
    """Rows of 3, 1, 2 and 3 entries; values are letters in the figures."""
    found = torch.zeros(4, 5)
    for number, place in enumerate(
        [(0, 0), (0, 2), (0, 3), (1, 1), (2, 0), (2, 4), (3, 1), (3, 2), (3, 3)]
    ):
        found[place] = number + 1
    return found


def letter(value: float) -> str:
    return "" if value == 0 else chr(ord("a") + int(value) - 1)


def shaded(values: Tensor, there: str, absent: str) -> list[list[str]]:
    return [[there if v else absent for v in row] for row in values.tolist()]


def one_kernel() -> str:
    """Gather, einsum and scatter as three kernels with buffers, and as one."""
    d = Drawing(700, 300, "Three kernels with two buffers in memory, or one kernel with none")
    d.text(20, 24, "C[AM[p],n] = AV[p] * B[AK[p],n]", mono=True)
    d.text(20, 60, "as torch operations: what is gathered and multiplied is written and read again")
    steps = (("gather", "B[AK]"), ("multiply", "AV * ..."), ("scatter", "index_add"))
    for number, step in enumerate(steps):
        x = 20 + 235 * number
        d.box(x, 76, 130, 52, step)
        if number < 2:
            d.cell(x + 152, 91, "(p,n)", MOVING, 62)
            d.arrow(x + 130, 102, x + 150, 102)
            d.arrow(x + 214, 102, x + 233, 102)
    d.text(
        20, 176, "as one kernel: a tile is gathered, multiplied and added where it is, in registers"
    )
    d.box(20, 192, 600, 86, ())
    inside = (
        ("load", "AK, AV, B[AK]"),
        ("multiply, sum", "tl.dot or *"),
        ("store or add", "C[AM]"),
    )
    for number, step in enumerate(inside):
        x = 40 + 195 * number
        d.box(x, 208, 160, 52, step, colour=STORED)
        if number < 2:
            d.arrow(x + 160, 234, x + 194, 234)
    return d.end()


def formats() -> str:
    """The same matrix as it is, as coordinates and in groups."""
    dense = matrix()
    coo, grouped = COO.from_dense(dense), GroupCOO.from_dense(dense, group_size=2)
    d = Drawing(700, 330, "A matrix, its coordinates, and its rows in groups of two")
    d.text(20, 24, "the matrix")
    d.grid(
        20, 36, [[letter(v) for v in row] for row in dense.tolist()], shaded(dense, STORED, "none")
    )
    assert coo.values is not None and grouped.values is not None
    d.text(190, 24, "COO: an entry after the other")
    for line, (name, values) in enumerate(
        (("AM[p]", coo.indices[0]), ("AK[p]", coo.indices[1]), ("AV[p]", coo.values))
    ):
        y = 36 + 30 * line
        d.text(190, y + 15, name, mono=True)
        labels = [letter(v) if name == "AV[p]" else str(int(v)) for v in values.tolist()]
        colour = STORED if name == "AV[p]" else "none"
        d.grid(250, y, [labels], [[colour] * len(labels)])
    d.text(190, 160, "GroupCOO: entries of one row, two by two; short groups are padded")
    d.text(190, 196, "AM[p]", mono=True)
    d.text(400, 196, "AK[p,q]", mono=True)
    d.text(545, 196, "AV[p,q]", mono=True)
    slots, numbers = grouped.slot_indices[0], grouped.values
    rows = [[str(int(v))] for v in grouped.group_indices[0].tolist()]
    high = 180
    d.grid(250, high, rows, [["none"]] * len(rows))
    d.grid(
        475,
        high,
        [[str(v) if v >= 0 else "" for v in row] for row in slots.tolist()],
        shaded(slots >= 0, "none", PADDING),
    )
    d.grid(
        620,
        high,
        [[letter(v) for v in row] for row in numbers.tolist()],
        shaded(slots >= 0, STORED, PADDING),
    )
    d.text(290, 196 + 2 * CELL, "one scatter for")
    d.text(290, 214 + 2 * CELL, "each group,")
    d.text(290, 232 + 2 * CELL, "not for each entry")
    return d.end()


def blocks() -> str:
    """Blocks in groups: the operands of a matrix product."""
    dense = torch.zeros(6, 8)
    for row, column in ((0, 0), (0, 2), (1, 1), (2, 0), (2, 1), (2, 3)):
        dense[2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = 1
    held = BlockGroupCOO.from_dense(dense, block_shape=(2, 2), group_size=2)
    d = Drawing(720, 240, "Blocks of a row side by side are one operand of a matrix product")
    d.text(20, 24, f"blocks of 2 x 2, {held.group_indices[0].numel()} groups of {held.group_size}")
    shades = shaded(dense, STORED, "none")
    for column in (0, 1, 4, 5):
        shades[0][column] = shades[1][column] = MOVING
    d.grid(20, 36, [[""] * 8] * 6, shades)
    d.arrow(205, 58, 258, 58)
    d.text(270, 24, "AV[p,q,bm,bk]: blocks of one group, K = (q,bk)")
    d.grid(270, 36, [[""] * 4] * 2, [[MOVING] * 4] * 2)
    d.text(375, 62, "x")
    d.grid(400, 36, [[""] * 6] * 4, [[PADDING] * 6] * 4)
    d.text(400, 150, "rows B[AK[p,q],bk,n]: gathered, N = n")
    d.text(548, 62, "=")
    d.grid(570, 36, [[""] * 6] * 2, [[STORED] * 6] * 2)
    d.text(570, 104, "C[AM[p],bm,n]")
    words = "One tl.dot takes as many blocks as fill its K axis: sparse rows become dense tiles,"
    d.text(20, 200, words)
    d.text(20, 218, "which Tensor Cores multiply.")
    return d.end()


def broadcasting() -> str:
    """Values with an axis for every variable, and with those that they have."""
    d = Drawing(700, 260, "Values get an axis only where they meet another")
    d.text(20, 24, "acc[m,n] += AV[m,k] * B[k,n]", mono=True)
    d.text(
        20, 58, "every value with every axis (m,k,n): loaded wide, then reshaped for the product"
    )
    for number, words in enumerate(
        (("AV", "(m,k,1)"), ("B", "(1,k,n)"), ("reshape", "(m,k), (k,n)"), ("tl.dot", "(m,n)"))
    ):
        x = 20 + 165 * number
        d.box(x, 72, 130, 50, words, colour=MOVING if number == 2 else "none")
        if number:
            d.arrow(x - 35, 97, x - 2, 97)
    d.text(
        20, 164, "lazily: each value carries its own axes, and is given more where it meets another"
    )
    for number, words in enumerate((("AV", "(m,k)"), ("B", "(k,n)"), ("tl.dot", "(m,n)"))):
        x = 20 + 165 * number
        d.box(x, 178, 130, 50, words, colour=STORED if number == 2 else "none")
        if number:
            d.arrow(x - 35, 203, x - 2, 203)
    return d.end()


def gradients() -> str:
    """The statement and those of its gradients."""
    d = Drawing(700, 210, "Gradients are the same statement with two places exchanged")
    d.box(20, 80, 270, 50, ("forward", "C[AM[p],n] = AV[p] * B[AK[p],n]"), colour=STORED)
    d.box(400, 20, 280, 50, ("gradient of B", "dB[AK[p],n] = dC[AM[p],n] * AV[p]"))
    d.box(400, 140, 280, 50, ("gradient of AV", "dAV[p] = dC[AM[p],n] * B[AK[p],n]"))
    d.arrow(290, 92, 398, 50)
    d.arrow(290, 118, 398, 160)
    d.text(330, 52, "C for B", at="end")
    d.text(330, 170, "C for AV", at="end")
    return d.end()


def figures() -> dict[str, str]:
    """By file name, every figure."""
    return {
        "how-one-kernel.svg": one_kernel(),
        "how-formats.svg": formats(),
        "how-blocks.svg": blocks(),
        "how-broadcasting.svg": broadcasting(),
        "how-gradients.svg": gradients(),
    }


if __name__ == "__main__":
    for name, picture in figures().items():
        (PICTURES / name).write_text(picture, encoding="utf-8")
