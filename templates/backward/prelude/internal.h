// What functions that several roles use may use of each other alone, beside device.h.

// Keys: the first row whose keys are as a predicate says, or end after one; by that the blocks of rows of a tile.
template <class Predicate> int first_row_where(const Lengths&, const Predicate& is_so) { return is_so(Keys{}); }
int first_row_past(const Lengths& lengths, int key), first_row_beyond(const Lengths& lengths, int key);
void find_last(Tile& tile, const Lengths& lengths, int first_key, const int& m_blocks);
void find_blocks(Tile& tile, const Lengths& lengths, int first_key, const int& m_blocks);

// Varlen: blocks of all sequences by their slots, and where a sequence lies.
struct Slots {
  const int32_t* offsets;
  int count;
  int first_of(int sequence) const;
  int owner(int slot) const;
};

void list_tiles(const Params& params), let_next_launch_begin();
void sum_shares(const Params& params, int place, int head);
struct Sequence sequence_of(const Params& params, int index);

// Rows before and after: what a thread block has of them, and sums of its dQ, which begin at none.
BlockOfRows own_block_of_rows(const Params& params);
void clear(RowBlock& record), prepare(const Params& params, const BlockOfRows& own, RowBlock& record);

// Sinks: what they have of a row, and sums of all threads of a block before or after.
float weight_of_sink(float sink, float lse), sum_of_block(float own);
