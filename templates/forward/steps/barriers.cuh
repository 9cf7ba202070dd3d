// Hardware barriers, by number; 0 is __syncthreads.
constexpr int kStore = 1;  // and up: each of one warpgroup
