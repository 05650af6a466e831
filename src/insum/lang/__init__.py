"""The language: text becomes a statement, and a statement with tensors a problem.

`expr` is the whole language as values, `parser` reads it. `bind` makes a `problem` of a statement
and its arguments: `signature` looks at their names, ranks and dtypes, `extents` at sizes, `measure`
does so again for other sizes; `types` are result dtypes. `expand` has the right side as a sum of
products, `derive` gradients as statements.
"""
