// Sequences lie one after another, each of its own length: one warp finds out where, and deals tiles.
