  const Tile found = tile_of(params, blockIdx.x / kCluster);
