  wait_for_launch_before();
  const TileList list = *params.list;
  if (int(blockIdx.x) / kCluster >= list.tiles * params.kv_heads) {
    return;
  }
  Sequence sequence;
  const Tile found = tile_of(params, list, sequence);
  if (threadIdx.x == 0) {
    shared.sequence = sequence;
  }
