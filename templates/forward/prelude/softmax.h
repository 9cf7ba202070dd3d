// What texts of Softmax may use of each other, and the consumer of it: what a thread keeps of its two rows, and how their
// scores become P. Where K has scales by block, what works on scores has those of the block too.
struct Softmax {
  using Scores = float[kBlockN / 2];
  using OfRows = float[2];

  // state: the scale of scores, rows' maxima and sums of P so far; the factors by which O is to be rescaled
  float scale;
  OfRows max, sum, rescale;
  bool raised;  // whether there are any
  bool far;     // whether exponents are so large that maxima are subtracted before

  // exponents: what they are relative to, and what is added to scaled scores for that; a scale with that of a block
  float reference(int r) const;
  float offset_of(int r) const;
  float factor_of(float k_scale) const;
  static constexpr int kShare = 8;  // scores under one scale
  bool is_far(int r) const;
  void move_far(Scores& s, const OfRows& before, const OfRows& old);
  float unrounded(int r) const;
  void begin_with(float sink, int r, float factor);  // from sinks to scores

  // maxima: with a block of scores; one that is near the one before stays
  void find_top(const Scores& s, OfRows& top) const;
  template <class BlockScales> void find_top(const Scores& s, OfRows& top, const BlockScales& block) const;
  bool is_close(const OfRows& top) const;
  void keep(int r, float before);
  void update_row_max(Scores& s);
  template <class BlockScales> void update_row_max(Scores& s, const BlockScales& block);

  // sums: P in place, added up, or with offsets, whose sums are its part; whether that proves that P fits
  void exponentiate(Scores& s);
  template <class BlockScales> void exponentiate(Scores& s, const BlockScales& block);
  bool exponentiate(const Scores& s, Scores& p, OfRows& part, const OfRows& offset) const;
  template <class BlockScales> void exponentiate(const Scores& s, Scores& p, OfRows& part, const BlockScales& block, const OfRows& offset) const;

  // lazy maxima: P relative to those so far; whether scores are widely spread
  bool guess(const Scores& s, Scores& p, OfRows& part) const;
  template <class BlockScales> void guess(const Scores& s, Scores& p, OfRows& part, const BlockScales& block) const;
  bool spread() const;
  bool in_curve(const Params& params) const;

  // promotion: a total of O, in registers or elsewhere once it has begun, and by what it is to be rescaled
  Output total;
  bool begun;
  OfRows missed;
  int blocks;
};
