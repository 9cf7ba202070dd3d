// Thread blocks stay and take units in turns.
