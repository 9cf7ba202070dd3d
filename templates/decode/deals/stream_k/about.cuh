// Thread blocks stay. Each takes splits that follow each other, and combines them itself from a sequence's first one on.
