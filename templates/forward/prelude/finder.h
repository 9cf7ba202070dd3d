// What texts of the finder, a warp that makes tiles of their numbers, may use of each other. Each lane has a sequence.
struct Finder {
  const Params& params;
  uint32_t classes;  // bit c: that there may be tiles of class c
  int tiles;         // of all classes
  int own_class;     // at hand
  int first;         // of the 32 sequences at hand
  Sequence sequence;
  int begin, end;  // its tiles of a head in this class

  int tiles_of_head() const, first_row_of(int m_block) const, warpgroups_from(int first_row) const;
  Blocks blocks_of_tile(const Sequence& lengths, int m_block) const;
  static int highest_class(uint32_t of);

  // keys: the first tile of a head that sees so many blocks
  int first_with(int least) const;

  // once: counts the tiles of a sequence, then of all; the first ones of the highest class
  int count(int index);
  void add_up();

  // then for 32 sequences at once: their tiles in this class, of so many heads
  void find_range();
  void count_up_to(int heads);

  // order of heads: the next 32 sequences, the next class
  void look();
};
