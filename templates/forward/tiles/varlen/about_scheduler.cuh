// Sequences lie one after another, each of its own length: a warp beside the producer finds out where, and deals tiles.
