// What texts of the loader, a single thread, may use of each other, and who runs it of it.
struct Loader {
  const Params& params;
  SharedStorage& shared;
  RingPosition<kStages> k, v;

  // boxes of one swizzle span each, which an mbarrier waits for, in a tile's sequence: its number, or where it lies
  struct Rows {
    int seqlen, end;
    operator int() const;
  };
  static Rows of_q(const Tile& tile), of_k(const Tile& tile);
  template <int columns, int rows, int slab>
  void copy(const CUtensorMap& map, TransactionBarrier& full, Element* tile, int row, int head, Rows sequence, cute::TMA::CacheHintSm90 hint);

  // packed, from a query on; and rows that nobody loads
  void copy_q(TransactionBarrier& full, Element* rows, int query, int head, Rows sequence);
  void clear_unused_rows();

  // loads: the next buffer of a ring, once it is empty
  int q_missing;
  void load_q(const Tile& tile), load_rows_of_q(const Tile& tile);
  void load_k(const Tile& tile, int block);
  void load_v(const Tile& tile, int block);

  // where O is stored from V's space: V comes once O has left it, and K may be ahead of that
  void wait_for_output();
  void load_k_ahead(const Tile& tile, int block);
};
