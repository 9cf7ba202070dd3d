"""The kinds of kernels, each a package of the same files; fagen.registry names them."""
