constexpr int kMachines = kMultiprocessors / kCluster;  // each of which has a tile at a time

// Tiles of a KV head in the order in which thread blocks take them, which is found before the main kernel: those with the most
// steps first, whichever sequence they are of. Of a sequence that is the order of its keys.
struct alignas(16) ListedTile {
  Sequence sequence;  // of a KV head what is kept, if other tiles have the rest of the group; else -1
  int first_key;
  uint16_t first_head, heads;  // of the group
};

struct alignas(16) TileList {
  int tiles;       // of a KV head
  int last_heads;  // of the last section
};
