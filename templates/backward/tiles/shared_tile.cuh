  const Tile& tile = shared.tile;  // registers are scarce
