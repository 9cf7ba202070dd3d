// What texts of the consumer may use of each other: one warpgroup of those that multiply.
struct Computing {
  const Params& params;
  SharedStorage& shared;
  const int warpgroup;
  static constexpr bool computes_dq = true;  // where one does it for all

  // steps: where it is in the rings of Q, dO and dS; which keys it has; products of gradients
  RingPosition<kStages> q;
  RingPosition<kDoStages> dout() const;
  RingPosition<kDsStages> ds() const;
  void advance();
  int first_row() const;
  void arrive(Barrier& barrier);
  void release(Barrier& empty);  // to who fills it, in both blocks of a cluster
  void store_ds(const Packed& packed);
  void issue_dv(ValueGradient& dv, Packed& p), issue_dk(KeyGradient& dk, Packed& d_scores);
  template <int slab_a, int slab_b, int count> void multiply_dq(float (&dq)[count], Descriptor a, Descriptor b);
  template <int count> void issue_dq(float (&dq)[count], const Element* rows, const Element* columns);
  template <bool masked, class... More> void step(const Tile& tile, int block, More&&... more_registers);
  template <class... Registers> void take_steps(const Tile& tile, Registers&... registers);

  // of warpgroups with keys of their own: all of a step in one, of which dQ by all or by one; a block that it does not see
  void issue_scores_and_dp(Scores& s, Scores& dp), multiply_others_ds(), pass();
  void issue_own_dq(QueryGradient& dq), issue_dq_of(int part, QueryGradient& dq);
  void multiply_ds(KeyGradient& dk, ValueGradient& dv, QueryGradient& dq, Packed& d_scores);
  bool sees_none(const Tile& tile, int block) const;

  // of warpgroups with a gradient each: the first makes P and dV, and hands P on; the other dS and dK, and hands dS on
  template <bool masked> void make_p(const Tile& tile, int block, Scores& s, Packed& p);
  void pass_p_on(const Packed& p), pass_p_on(const Scores& p), take_p(Packed& p), pass_ds_on();
  void make_dv(const Tile& tile, ValueGradient& dv), step_dk(KeyGradient& dk), finish_dk(KeyGradient& dk);
  template <int count> void issue_dq_from(int column, float (&dq)[count]);

  // scores: S - LSE / scale and dP - delta, which begin with statistics of the rows; P and dS of them
  uint32_t k[kHeadDimPadded / 4];  // where K stays in registers
  template <int slab, int swizzle_bits, int count> void load_keys(uint32_t (&keys)[count], const Element* tile);
  void issue_statistics(Scores& s, Scores& dp), issue_statistics(Scores& s, int stage, int which);
  void issue_scores(Scores& s, int stage), issue_dp(Scores& dp);
  using Sloped = Scores; template <bool masked, class... Weights> void exponentiate(const Tile& tile, int block, Scores& s, Weights&... p_and_sloped);
  void differentiate(const Scores& p, Scores& dp), differentiate(const Packed& p, Scores& dp), keep_sloped(Scores&, int, float, float);
  void pack_scores(Packed& packed, const Scores& s);

  // sums: numbers of dQ go to the thread that adds them up, all at once or the last slice under the next step
  uint32_t dq_phase;
  void count_step();
  int adder() const;
  template <int count> void hand_on(float4* to, const float* numbers, int part, uint32_t phase, int adder);
  template <int count> void pass_dq_on(const float (&dq)[count], int part);
  template <int count> void pass_rest_on(int part);

  // outputs: dK and dV of a tile, stored, handed on to the thread that stores them, or kept as a share of a group
  struct KeyBlock& share_of(const Tile& tile) const;
  template <int all, int count> void keep(float (&share)[all], const float (&gradient)[count]);
  template <int columns, int slab, int swizzle_bits, int count> void round_rows(Element* space, const float (&gradient)[count], float scale);
  void copy_rows(const CUtensorMap& map, const Element* from, int column, const Tile& tile);
  void store_dv(const Tile& tile, const ValueGradient& dv), store_dk(const Tile& tile, const KeyGradient& dk), finish();
  void leave(const Tile& tile, const KeyGradient& dk, const ValueGradient& dv);
  void leave_dv(const Tile& tile, const ValueGradient& dv), leave_dk(const Tile& tile, const KeyGradient& dk);
};
