// What a warp has counted of all sequences.
struct alignas(16) Counted {
  uint32_t classes;
  int tiles;
};
