  const Tile& tile = found;
