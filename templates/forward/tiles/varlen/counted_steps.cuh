// What a warp has counted of all sequences, and of a head's tiles the steps of the longest, and of all of them.
struct Counted {
  uint32_t classes;
  int tiles, longest;
  float steps;
};
