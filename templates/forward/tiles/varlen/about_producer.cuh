// Sequences lie one after another, each of its own length: the producer finds out where, and deals tiles.
