"""Plans become programs, and programs run.

A call (`fused`) takes a program from its `shelf`, by its size class (`classify`) and the `answers`
to what plans ask; `build` makes a `program`, `ready` binds one to a call (a `bound_launch` each),
`unseen` to calls of other sizes; the `prologue` is what it needs of index tensors, partly by
`handwritten` kernels. `check` and `record` are about indices out of range. Below: `compiling` (by
`workers`, noted by `binaries`, kept on `disk`) and `launch`. Beside: `search`, `cache` and `timing`
for tuning, `inspection`, `symbolic` sizes, and several statements in `one_launch`.
"""
