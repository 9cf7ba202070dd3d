// What texts of the loader, a single thread, may use of each other: dense and varlen tensors each give copy and copy_keys; rows
// of one thread block, of a pair or of a sequence give copy_rows; keys of one or of a pair load_k.
struct Loader {
  const Params& params;
  SharedStorage& shared;

  // boxes of one swizzle span each, which an mbarrier waits for
  template <int columns, int rows, int slab>
  void copy(const CUtensorMap& map, TransactionBarrier& full, Element* tile, int row, int head, int batch, cute::TMA::CacheHintSm90 hint);
  template <int columns, int slab>
  void copy_keys(const CUtensorMap& map, TransactionBarrier& full, Element* to, const Tile& tile);
  template <int columns, int slab>
  void copy_rows(const CUtensorMap& map, TransactionBarrier& full, Element* to, const Tile& tile, int head, int block);

  void load_k(const Tile& tile);  // once for a thread block

  // steps: the next buffer of a ring, whose mbarrier waits for so many bytes, these or some more
  static constexpr uint32_t kQBytes = 0, kDoutBytes = 0;
  void load_q(RingPosition<kStages>& q, const Tile& tile, int head, int block, uint32_t bytes);
  void load_dout(RingPosition<kDoStages>& dout, const Tile& tile, int head, int block, uint32_t bytes);

  // tiles that are drawn: the number of one, or that of none; all of a tile in the rings, which returns the next one's number
  RingPosition<kStages> q;
  RingPosition<kDoStages> dout;
  void load_keys(const Tile& tile);
  int draw(int without) const, load(const Tile& tile);
};
