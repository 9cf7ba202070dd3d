// What texts of the consumer may use of each other.
struct Any {  // a type that only some kernels have
  template <class T> operator T() const;
  template <class T> operator const T&() const;
};
struct Consuming {
  using Scores = float[kBlockN / 2];
  using Probabilities = uint32_t[kBlockN * sizeof(Element) / 8];
  using OfRows = const float (&)[2];
  using WhichRows = const bool (&)[2];
  const Params& params;
  SharedStorage& shared;
  const int warpgroup;
  Loader loader;
  RingPosition<kQStages> q;
  RingPosition<kStages> k, v;
  int first_row(const Tile& tile) const, has_rows(const Tile& tile) const;
  void wait_q(), wait_k(), wait_v(), release(Barrier& empty), release_q(bool final_block), release_k(), release_v();
  // tiles, keys
  int seqlen_q(const Tile& tile) const, seqlen_k(const Tile& tile) const, keys_seen(const Tile& tile, int block) const;
  const Element* q_row(const Tile& tile, int row) const;
  Any row_keys(const Tile& tile, int row) const;
  void mask_block(Scores& s, const Tile& tile, int block) const;
  // values
  Descriptor v_begin(int column = 0) const;
  uint32_t v_offset(int n) const;
  bool in_range(const Probabilities& p) const, promotes(Output& o, Softmax& softmax);
  void pack_p(Probabilities& p, const Scores& s) const, issue_pv(Output& o, Probabilities& p), add_pv(Output& o, Probabilities& p);
  template <class Part> void issue_pv(Part& part, Probabilities& p, int column);
  template <class Part> void add(Output& o, Part& part, int column);
  template <int later = 0, class... More> void finish_pv(Output& o, More&&... part_p_meanwhile) {}
  void rescale_output(Output& o, Softmax& softmax), promote(Output& o, Softmax& softmax), collect(Output& o, const Softmax& softmax);
  void prefetch_columns(const Tile& tile) const;
  // scores
  int spread_first;
  Any key_scales;
  bool spread(const Tile& tile, int block, const Softmax& softmax);
  void issue_qk(Scores& s), finish_qk(Scores& s, bool final_block), read_scales();
  void first_scores(const Tile& tile, Scores& s, Probabilities& p, Softmax& softmax), next_scores(Scores& s, Probabilities& p, Output& o, Softmax& softmax);
  template <bool each_maximum = false, class... More> void next_scores_under_pv(Scores& s, Probabilities& p, Output& o, More&... part_softmax);
  Softmax softmax_of(const Tile& tile) const, fresh_softmax() const;
  float q_scale_of(const Tile& tile, int row) const, mean_score(const Tile& tile, int row) const;
  // steps
  void begin_turn(const Tile& tile), end_turn(const Tile& tile), pass_on_turn(), reset(Output& o, Softmax& softmax);
  template <bool masked, bool each_maximum = false, class... More> void step(const Tile& tile, int block, More&... s_p_o_softmax);
  Blocks own_blocks(const Tile& tile) const;
  Tile warpgroup_tile(Tile tile) const;
  void skip_k(const Tile& tile), skip_v(int blocks), skip_step(const Tile& tile, bool final_block);
  void first_block(const Tile& tile, Scores& s, Probabilities& p, Softmax& softmax), finish_first(const Tile& tile, Scores& s, Probabilities& p, Softmax& softmax);
  void last_pv(Probabilities& p, Output& o), prefetch_tile(const Tile& tile), prefetch(const Tile& tile, int block);
  int next_with_rows(Tiles& tiles), blocks_in(const Tile& tile) const;
  template <class... More> void mainloop(Tiles& tiles, More&... tile_o_softmax);
  // output: columns from `first` on
  template <int columns, class Out> bool round_rows(Out* rows, const Output& o, int first, OfRows inverse, WhichRows empty);
  template <int columns> void write_columns(const Tile& tile, const Output& o, int first, OfRows inverse, WhichRows empty);
  void write(const Tile& tile, const Output& o, OfRows inverse, WhichRows empty), descale(const Tile& tile, Output& o, OfRows inverse, WhichRows empty) const;
  void scale_columns(const Tile& tile, Output& o) const, store(const Tile& tile, Output& o, Softmax& softmax);
  template <class Out> void copy_out(const Tile& tile, const Out* slab, int column);
  int64_t lse_begin(const Tile& tile) const;
};
