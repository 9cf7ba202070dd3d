// What texts of the consumer may use of each other.
struct Computing {
  const Params& params;
  SharedStorage& shared;
  RingPosition<kStages> tile;
  RingPosition<kQStages> q;
  int p;
  Output o;
  Statistics reference, sum;

  // steps
  void arrive(Barrier& barrier);
  void issue_scores(Scores& s);
  void finish_scores(Scores& s);
  void issue_output(const Element* values);
  void fence_output();
  void clear_values(Element* values, int keys);
  void begin(const Unit& unit);
  void first_scores(Scores& s);
  void step(const Unit& unit, const Keys& seen_by_all, int key, Scores& s);
  void last_step(const Unit& unit, const Keys& seen_by_all, int key, Scores& s);

  // keys
  Keys seen_by_all(const Unit& unit);
  void mask(const Unit& unit, int key, Scores& s), score_keys(const Unit& unit, int key, Scores& s);

  // scores
  bool takes(const Unit& unit, int j) const;
  int own_of(int j), own_row(int j) const;  // of several KV heads: whose a column is, and which of its rows
  float first_reference(const Unit& unit, int j) const;
  bool has_references(const Unit& unit, int key) const;
  bool exact, failed;  // of a fixed maximum
  bool find_failed(const Unit& unit);
  bool outgrown(const Scores& s);
  void exponentiate(const Scores& s, Statistics& total);
  void settle(const Scores& s);
  void softmax(const Unit& unit, int key, Scores& s);  // P in shared memory

  // deals
  void take(Unit& unit);  // computes all of it

  // combine
  bool combines;
  void add_up_sums(), begin_combining(), combine(int j, float total);  // a split's output, with those before it
  float combined_reference_of(int j) const, combined_sum_of(int j) const;
  template <class Store> void for_each_combined(int j, Store store) { for_each_number(o, j, store); }
  void finish(const Unit& unit);  // hands a split's output on
  void finish(const Unit& unit, bool ends);
  template <class HandOn>
  void for_each_row(const Unit& unit, HandOn hand_on) {
    hand_on(0, 0.0f, 0, 0);  // j, the sum of P, position, head
  }
  template <class Store>
  void for_each_number(Output& output, int j, Store store) {
    store(0, 0.0f);  // column, number
  }
  void store_output(const Unit& unit, int j, float total, int position, int head);  // of a row that has one split
  void store_partial(int j, int64_t index);
  void store_share(int j, int64_t index, float total);
};
