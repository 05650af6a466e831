"""How a CPU runs a statement: a few ways that need less memory and time than gather, einsum and
scatter over whole tensors, and the choice among them (`insum.host.choose`).
"""
