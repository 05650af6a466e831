"""What is derived from index tensors before kernels run: orders, segments, tasks, tables."""
