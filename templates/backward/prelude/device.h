// What texts of the loader, the producer, the consumer and the kernel may use, beside the head and sm90/: their interface.
// A test parses each behind it.

// Keys: which of them a row sees, and how many parts that gives the dQ of a block of rows.
struct Keys {
  int first, last;
};

Keys seen_by(const Lengths& lengths, int row);
int first_tile_of(const Lengths& lengths, int m_block);  // of keys, where the block of rows sees any
int tiles_of(const Lengths& lengths, int m_block);

// Tiles: of some keys all rows that see them, in the order of steps.
Tile tile_of(const Params& params, int index);
Tile tile_of(const Params& params, const struct TileList& list, struct Sequence& sequence);  // varlen: the thread block's
Tile own_tile_anew(const Params& params);  // where it ends
int block_of(const Tile& tile, int step);
const Lengths& lengths_of(const Params& params, const SharedStorage& shared);
RowBlock& row_block_of(const Params& params, const SharedStorage& shared, const Tile& tile, int head, int block);
int section_of(const Params& params, int flat_kv_head);  // of heads
int cluster_rank();

// Those that the producer draws, for one of the others; none where first_key is negative.
struct Tiles {
  SharedStorage& shared;
  const Tile& look() const;
  Barrier& take();  // who arrives there has read it
};

// Rows before and after: one block of them, in the tensors and in the workspace.
struct BlockOfRows {
  int batch, head, m_block;
  RowBlock& record(const Params& params) const;
  const Lengths& lengths(const Params& params) const;
  bool exists() const;  // varlen
  int left() const;     // too: rows from its first one to the end of the sequence
  template <class T>
  T* row(const Rows<T>& rows, int query) const;
  float number(const Numbers& numbers, int query) const;
};

BlockOfRows block_of_rows(const Params& params, int index);

// Scores and steps: products, with ones, K, P or dS in registers or by descriptor, and parts of tiles.
template <bool accumulate> void wgmma_statistics(Scores& s, const uint32_t* ones, Descriptor statistics);
template <bool accumulate> void wgmma_statistics(Scores& s, Descriptor ones, Descriptor statistics);
template <bool accumulate> void wgmma_scores(Scores& s, Descriptor keys, Descriptor rows);
template <bool accumulate> void wgmma_kept(Scores& s, const uint32_t* keys, Descriptor rows);
template <bool accumulate, int count> void wgmma_gradient(float (&gradient)[count], const uint32_t* p_or_ds, Descriptor rows);
template <bool accumulate, int count> void wgmma_dq(float (&dq)[count], Descriptor a, Descriptor b);
template <int rows, int slab> Descriptor along_columns(const Element* tile, cute::SM90::GMMA::LayoutType layout);
template <int slab> constexpr uint32_t row_offset(int k) { return k; }

// The other thread block of a cluster: copies to the same place there.
void copy_to_peer(const void* from, const void* to, const TransactionBarrier& full, int bytes);

// Scores: their tanh. Sums: how many numbers of dQ a warpgroup has.
float tanh_approx(float x);
constexpr int dq_part(int) { return kWarpgroupRows * kDqColumns; }
