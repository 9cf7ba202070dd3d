  const int tile_blocks = 1;  // thread blocks of a tile
