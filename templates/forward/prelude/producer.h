// What functions of the warps beside the consumers may use of each other.

// Varlen tiles by their numbers, and how one is passed on.
struct TileFinder {
  const Params& params;
  int tiles;  // of all sequences
  template <class Counted> void begin_with_longest(const Counted* counted);
  bool find(int number, Tile& tile);
};

struct TileRing {
  void pass_on(SharedStorage& shared, uint32_t stage);
};

// Tiles: dense or varlen, who draws them and passes them on, or asks another warp to.
struct TileScheduler {
  TileFinder finder;
  TileScheduler(const Params& params, SharedStorage& shared);
  TileScheduler(SharedStorage& shared, TileFinder finder);
  bool next(Tile& tile);
  void draw();
  static int draws_at(const Blocks& blocks);  // the block at which the next tile is drawn
};

struct TileRequests : Tiles {
  void take();
  void draw();
  static int draws_at(const Blocks& blocks);
};

// Loads: descales of keys that share one, and who writes those of a block to shared memory.
struct Descales {
  void read(const Params& params, const Tile& tile, int group);
  template <class Scales> void write(Scales& scales) const;
};

struct ScaleProducer {
  const Params& params;
  SharedStorage& shared;
  void write(const Tile& tile, int block);
};

// V by rows becomes V by columns: a warp's part of a block, and of the next block once it is there.
template <int transposer> void transpose(const Element* rows, Element* columns);
template <int transposer> void transpose_block(SharedStorage& shared, RingPosition<kStages>& v);
