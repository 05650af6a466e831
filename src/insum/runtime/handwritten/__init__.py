"""Kernels that are written by hand (`kernel`): tables, orders and lists that are made of index
tensors on the device, without waiting. Prologues and layers use them.
"""
