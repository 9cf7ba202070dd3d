"""Which kernel serves a problem at given sizes: dispatch tables, and defaults where none says."""
