// What texts of the consumer, one warpgroup with 64 rows of a tile, may use of each other.
struct Consuming {
  using Scores = float[kBlockN / 2];
  using Probabilities = uint32_t[kBlockN * sizeof(Element) / 8];
  using OfRows = const float (&)[2];
  using WhichRows = const bool (&)[2];
  const Params& params;
  SharedStorage& shared;
  const int warpgroup;
  // tiles, keys: what a tile's rows are, and which keys they see
  int seqlen_q(const Tile& tile) const, seqlen_k(const Tile& tile) const, keys_seen(const Tile& tile, int block) const;
  const Element* q_row(const Tile& tile, int row) const;
  Keys row_keys(const Tile& tile, int row) const;
  void mask_block(Scores& s, const Tile& tile, int block) const, score_block(Scores& s, const Tile& tile, int block) const;

  // steps: rings, whose buffers are waited for and given back; turns at the tensor cores; a tile's blocks but those skipped
  RingPosition<kQStages> q;
  RingPosition<kStages> k, v;
  void wait_q(), wait_k(), wait_v(), release(Barrier& empty), release_q(bool final_block), release_k(), release_v();
  void begin_turn(const Tile& tile), end_turn(const Tile& tile), pass_on_turn(), reset(Output& o, Softmax& softmax);
  int first_row(const Tile& tile) const, has_rows(const Tile& tile) const, query_of(int row) const, head_of(const Tile& tile, int row) const, blocks_in(const Tile& tile) const, next_with_rows(Tiles& tiles), left_over;
  Blocks own_blocks(const Tile& tile) const;
  Tile warpgroup_tile(Tile tile);
  void skip_k(const Tile& tile), skip_v(int blocks), skip_step(const Tile& tile, bool final_block);
  void first_block(const Tile& tile, Scores& s, Probabilities& p, Softmax& softmax), finish_first(const Tile& tile, Scores& s, Probabilities& p, Softmax& softmax);
  template <bool masked, bool each_maximum = false, class... More> void step(const Tile& tile, int block, More&... s_p_o_softmax);
  template <class... More> void mainloop(Tiles& tiles, More&... tile_o_softmax);
  Loader loader;  // where no warp loads beside
  void prefetch_tile(const Tile& tile), prefetch(const Tile& tile, int block);

  // values: P, in registers; O += PV, whole or in parts, with something done meanwhile; sums that move to a total
  void pack_p(Probabilities& p, const Scores& s) const, add_pv(Output& o, Probabilities& p), add_pv(Output& o, Probabilities& p, const Softmax& softmax), last_pv(Probabilities& p, Output& o), last_pv(Probabilities& p, Output& o, const Softmax& softmax);
  Descriptor v_begin(int column = 0) const;
  uint32_t v_offset(int n) const;
  void issue_pv(Output& o, Probabilities& p), issue_pv(Part& part, Probabilities& p, int column), add(Output& o, Part& part, int column, OfRows rescale);
  template <int later = 0> void finish_pv(Output& o);
  template <class Meanwhile = int> void finish_pv(Output& o, Part& part, Probabilities& p, OfRows rescale, Meanwhile meanwhile = {}) {}
  bool in_range(const Probabilities& p) const, promotes(Output& o, Softmax& softmax);
  void promote(Output& o, Softmax& softmax), collect(Output& o, const Softmax& softmax), rescale_output(Output& o, Softmax& softmax);

  // scores: S = QK, and P of a tile's first block and of the next ones, alone or under PV
  void issue_qk(Scores& s), finish_qk(Scores& s, bool final_block), read_scales();
  struct {} key_scales; float product_scale;  // of a block and of S before it becomes scores, where there are descales
  int spread_first;      // from this block on to the tile's last, maxima are found before P
  bool spread(const Tile& tile, int block, const Softmax& softmax), by_curve, curved, all_in_curve(const Softmax& softmax), curved_scores(const Scores& s, Probabilities& p, Softmax& softmax);
  void first_scores(const Tile& tile, Scores& s, Probabilities& p, Softmax& softmax);
  void next_scores(Scores& s, Probabilities& p, Output& o, Softmax& softmax), curved_step(const Tile& tile, int block, Scores& s, Probabilities& p, Output& o, Softmax& softmax);
  template <bool each_maximum = false, class... More> void next_scores_under_pv(Scores& s, Probabilities& p, Output& o, More&... part_softmax);
  Softmax softmax_of(const Tile& tile) const, fresh_softmax() const;
  float q_scale_of(const Tile& tile, int row) const, mean_score(const Tile& tile, int row) const;

  // output: columns from `first` on are rounded to shared memory and copied; with descales they are averages before
  template <int columns, class Out> bool round_rows(Out* rows, const Output& o, int first, OfRows inverse, WhichRows empty);
  template <int columns> void write_columns(const Tile& tile, const Output& o, int first, OfRows inverse, WhichRows empty);
  float of_keys[2];  // their share of a row, beside its sink
  template <class Out> void copy_out(const Tile& tile, const Out* slab, int column);
  void prefetch_columns(const Tile& tile) const, scale_columns(const Tile& tile, Output& o) const, add_means(const Tile& tile, Output& o) const;
  void descale(const Tile& tile, Output& o, OfRows inverse, WhichRows empty) const, store(const Tile& tile, Output& o, Softmax& softmax), write(const Tile& tile, const Output& o, OfRows inverse, WhichRows empty);
  int64_t add_parts(const Tile& tile, Output& o, Softmax& softmax), lse_begin(const Tile& tile) const, lse_begin(const Tile& tile, int number) const;
};
