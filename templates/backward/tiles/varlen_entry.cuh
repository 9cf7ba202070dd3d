  Sequence sequence;
  const Tile tile = tile_of(params, sequence);
  if (tile.first_key >= sequence.held_k) {
    return;
  }
