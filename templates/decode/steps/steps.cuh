  __device__ __forceinline__ void begin(const Unit& unit) {
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      // what nothing outgrows: no row that is none has a say
      reference[j] = takes(unit, j) ? first_reference(unit, j) : INFINITY;
      sum[j] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kRows / 2; ++j) {
        o[i][j] = 0.0f;
      }
    }
  }

  // P of the keys from `key` on, in shared memory; the next buffer of the ring has their V.
  __device__ __forceinline__ void weigh_keys(const Unit& unit, const Keys& seen_by_all, int key, Scores& s) {
    if (key < seen_by_all.first || key + kBlockN > seen_by_all.last) {
      mask(unit, key, s);
      if (key + kBlockN > unit.sequence.length) {
        shared.full[tile.stage].wait(tile.phase);
        clear_values(shared.ring[tile.stage], unit.sequence.length - key);
      }
    }
    p ^= 1;
    softmax(unit, key, s);
    shared.full[tile.stage].wait(tile.phase);
  }

  // What is issued in a step is waited for in the same, else ptxas waits for each product.
  __device__ __forceinline__ void first_scores(Scores& s) {
    shared.full[tile.stage].wait(tile.phase);
    issue_scores(s);
    finish_scores(s);
  }

  // The product of the keys from `key` on; scores of the next ones are on their way at the end.
  __device__ __forceinline__ void step(const Unit& unit, const Keys& seen_by_all, int key, Scores& s) {
    weigh_keys(unit, seen_by_all, key, s);
    const int values = tile.stage;
    issue_output(shared.ring[values]);
    tile.advance();
    shared.full[tile.stage].wait(tile.phase);
    issue_scores(s);
    wgmma_wait<1>();
    fence_output();
    arrive(shared.empty[values]);
  }

  // The product of a unit's last keys, from `key` on.
  __device__ __forceinline__ void last_step(const Unit& unit, const Keys& seen_by_all, int key, Scores& s) {
    arrive(shared.q_empty[q.stage]);
    q.advance();
    weigh_keys(unit, seen_by_all, key, s);
    issue_output(shared.ring[tile.stage]);
    wgmma_wait<0>();
    fence_output();
    arrive(shared.empty[tile.stage]);
    tile.advance();
  }
