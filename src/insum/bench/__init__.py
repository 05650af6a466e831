"""The paper's tables and figures against real rivals: ``insum bench``, or ``python -m insum.bench``
where typer and rich are not installed.

In the order data passes: `data` (graphs and clouds), one module for each benchmark (cases and
contenders), `measure` (check first, then clock and memory), `records` (rows, and their file),
`table`, `plots` and `page` (what one looks at), `main` (the command).
"""
