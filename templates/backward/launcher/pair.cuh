  const int tile_blocks = kCluster;  // thread blocks of a tile
