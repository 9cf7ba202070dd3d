  const Tile tile = tile_of(params, blockIdx.x / kCluster);
