  // Tiles of a round that leaves SMs idle are in parts of their keys, as many as take the least blocks of keys, and what
  // takes as long.
  const int64_t blocks = ceil_div(a.seqlen_k, kBlockN), last = tiles % multiprocessors;
  int64_t parts = 1, least = blocks + kTileBlocks;
  for (int64_t count = 2; count <= std::min<int64_t>(kMostParts, blocks) && last > 0 && last * count <= kMostUnits; ++count) {
    const int64_t of_part = ceil_div(blocks, count) + kTileBlocks + kPartBlocks;
    const int64_t taken = ceil_div(last * count, multiprocessors) * of_part + count * kPartBlocks;
    if (taken < least) {
      parts = count;
      least = taken;
    }
  }
  params.whole = int(parts > 1 ? tiles - last : tiles);
  params.part_blocks = int(std::max<int64_t>(1, ceil_div(blocks, parts)));
  params.parts = FastDivisor(int(std::max<int64_t>(1, ceil_div(blocks, params.part_blocks))));  // none is empty
  params.slots = params.whole + (tiles - params.whole) * params.parts.value;
  const int grid = std::min(params.slots, multiprocessors);
