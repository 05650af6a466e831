"""How a problem becomes kernels: decisions, as frozen values. Nothing here reads a tensor.

Before: `order` (of `steps`), `path`, `library`, `layouts`. One product: `draft`, `roles`, `sizes`,
`questions`, then the rules of `strategies` (by `substitution`), `windows`, `beside`, `joining`, and
the `plan`, with the `recipes` of what it needs. Its config: `first_guess` by `tiling` and
`orientation`, `fitting` and `aligning`, the `space` of `legal` others, and their `cost`.
"""
