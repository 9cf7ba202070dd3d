  const int grid = int(tiles * tile_blocks);
