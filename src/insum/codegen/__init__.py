"""A plan and a config become the text of a Triton kernel. Nothing here imports Triton.

`emit` writes a kernel: its `frame`, what it `reads`, how it contracts (`contract`) and what becomes
of that (`output`), of `values` and `functions`. `unrolled` writes out short constant patterns,
`copies` the kernels that copy factors first, `checking` the one that looks at indices; `arguments`
is what kernels are passed.
"""
