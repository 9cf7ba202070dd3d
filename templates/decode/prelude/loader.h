// What texts of the loader may use of each other: who has loads gives load_k, load_v and prefetch, who has deals or scores
// goes through the units.
struct Loader {
  const Params& params;
  SharedStorage& shared;
  RingPosition<kStages> tile;
  RingPosition<kQStages> q;

  void load_k(const Unit& unit, int key);  // the next buffer of the ring becomes a block of K
  void load_v(const Unit& unit, int key);
  void load_q(const Unit& unit);
  // of pages: by a warp, whose lanes have entries of the block table
  void look_up(const Unit& unit);
  int find_box(const Unit& unit, int key, int i);
  void find_next_box(const Unit& unit);
  template <int columns>
  void load(const CUtensorMap& boxes, const CUtensorMap& rows, const Unit& unit, int key, int all);
  void prefetch(const Unit& unit);
  template <int columns> void prefetch(const CUtensorMap& map, const Unit& unit, int key);  // a block of K, or of V
  bool find_failed(const Unit& unit);  // by a fixed maximum: whether a row is computed again
  void take(const Unit& unit);         // loads all of it
};
