"""A problem as a graph of torch operations: the reference, and what runs where nothing is faster.

`lower` puts the stages together, in the order of the data: `gather` reads, `value` computes (in the
order that `contraction` finds), `scatter` writes; `nodes` has what all of them are made of.
`inductor` compiles a graph, of which `matmul` makes plain matrix products first.
"""
