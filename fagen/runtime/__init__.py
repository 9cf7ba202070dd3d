"""Calls of kernels from torch: checks, the C interface, ops, and the functions that users call."""
