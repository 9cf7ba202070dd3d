"""Time the committed kernels beside those of another revision, in turn in one process.

    python benchmarks/against.py dd8a2d3                            the grid in all dtypes, 3 repeats
    python benchmarks/against.py main~1 --dtype fp16 --repeats 1

A cell is a problem of the benchmark grid; its kernels are the one that fagen.attention takes for it
now, and the same schedule's as it was generated at the revision (git's detection of renames finds
it). Both are called through their C functions on the same tensors, in short rounds in random order.
A repeat goes through all cells. What is printed is the speed of the new one over the old: each
cell's median over the repeats and worst repeat, geomeans for each dtype and head dim; all of it is
written to benchmarks/results/<card>-<date>-against.json. The exit code is 6 where outputs differ.
"""
