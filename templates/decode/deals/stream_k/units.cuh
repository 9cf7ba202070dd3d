// Where a run begins, of parts that are dealt to all runs: they have as many each, or one more.
__device__ __forceinline__ int begin_of(int run, int parts, int runs) {
  return parts / runs * run + parts % runs * run / runs;
}

// The same of groups whose tiles stay whole for want of lengths: the first runs may have one more.
__device__ __forceinline__ int begin_of_whole(const Params& params, int run) {
  return min(run * params.of_run + min(run, params.longer_runs), params.whole_groups);
}

// The tile of a group of neighbouring tiles that is this thread block's.
__device__ __forceinline__ int tile_of(const Params& params, int group) {
  const int abreast = params.abreast.value;
  return group * abreast + int(blockIdx.x) - params.abreast.divide(blockIdx.x) * abreast;
}

// Splits in the order of sequences, of an output tile each (a KV head and a tile of rows), and of keys. All of it is cut
// into runs of the same number of steps, and what a run has of a tile is a unit. A thread block that begins with a tile's
// first split combines what follows in registers, so most outputs are written once, and wholly. Neighbouring blocks go
// through a run abreast, each in a tile of its own: they read the same keys, of neighbouring heads, at a time.
//
// Where a run's share is less than two of the longest splits, cutting would give some runs two of them, and some one. Then
// runs take splits in turns, long ones and short ones.
struct Units {
  const Params& params;
  int at, end;            // steps of the run, counted from the first sequence: a split is its block's who has its first step
  bool in_turns = false;  // then they are splits
  int window = 0;         // of 32 sequences, one for each lane: the first of them
  Sequence own;           // the lane's
  int parts, ends;        // steps, or splits, of the lane's sequence, and up to it with its own

  // By all lanes of a warp.
  __device__ __forceinline__ explicit Units(const Params& params) : params(params) {
    const int each = tile_steps(sequence_of(params, 0));
    const int run = params.abreast.divide(blockIdx.x), runs = params.abreast.divide(gridDim.x);
    if (params.whole_groups > 0) {
      at = begin_of_whole(params, run) * each;
      end = begin_of_whole(params, run + 1) * each;
      count(0);
      return;
    }
    int total = 0, splits = 0, longest = 0;
    bool alike = true;
    for (int batch = lane(); batch < params.batch; batch += 32) {
      const Sequence sequence = sequence_of(params, batch);
      const int steps = tile_steps(sequence);
      total += steps;
      splits += splits_of(params, sequence.length);
      longest = max(longest, split_steps(sequence));
      alike &= steps == each;
    }
    total = __reduce_add_sync(0xffffffffu, total) * params.tile_groups.value;
    splits = __reduce_add_sync(0xffffffffu, splits) * params.tile_groups.value;
    longest = __reduce_max_sync(0xffffffffu, longest);
    // Tiles that are alike may stay whole: then nothing is left to be combined.
    const bool whole = params.level && __all_sync(0xffffffffu, alike);
    if (!whole && total / runs < 2 * longest) {
      at = run;
      end = splits;
      in_turns = true;
    } else {
      const int least = whole ? max(1, each) : 1;
      at = begin_of(run, total / least, runs) * least;
      end = begin_of(run + 1, total / least, runs) * least;
    }
    count(0);
  }

  // Each split takes a step more than it has blocks of keys: to be begun and combined.
  __device__ __forceinline__ int tile_steps(const Sequence& sequence) const {
    return blocks_of(sequence.length, kBlockN) + splits_of(params, sequence.length);
  }

  __device__ __forceinline__ int split_steps(const Sequence& sequence) const {
    return split_keys(params, sequence.length) / kBlockN + 1;
  }

  __device__ __forceinline__ int parts_of(const Sequence& sequence) const {
    return (in_turns ? splits_of(params, sequence.length) : tile_steps(sequence)) * params.tile_groups.value;
  }

  // Of the sequences of a window, behind so many parts.
  __device__ __forceinline__ void count(int before) {
    const int batch = window + lane();
    own = batch < params.batch ? sequence_of(params, batch) : Sequence{0, 0};
    parts = parts_of(own);
    ends = parts;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int others = __shfl_up_sync(0xffffffffu, ends, step);
      ends += lane() >= step ? others : 0;
    }
    ends += before;
  }

  // Behind whole tiles come the splits of others, for runs that have no more tiles than most; whether there are any.
  __device__ __forceinline__ bool take_turns() {
    const int run = params.abreast.divide(blockIdx.x) - params.longer_runs;
    if (in_turns || params.whole_groups == 0 || run < 0) {
      return false;
    }
    const int splits = splits_of(params, params.seqlen_k);
    in_turns = true;
    at = params.whole_groups * splits + run;
    end = params.batch * params.tile_groups.value * splits;
    window = 0;
    count(0);
    return at < end;
  }

  // The next unit of the run, by all lanes of a warp; false: there is none left.
  __device__ __forceinline__ bool next(Unit& unit) {
    while (at < end) {
      uint32_t beyond;
      while (!(beyond = __ballot_sync(0xffffffffu, at < ends))) {
        window += 32;
        if (window >= params.batch) {  // lengths that nobody has waited for yet may have changed since they were summed
          return false;
        }
        count(__shfl_sync(0xffffffffu, ends, 31));
      }
      const int owner = __ffs(beyond) - 1;
      unit.batch = window + owner;
      unit.sequence.first = __shfl_sync(0xffffffffu, own.first, owner);
      unit.sequence.length = __shfl_sync(0xffffffffu, own.length, owner);
      const int rank = at - __shfl_sync(0xffffffffu, ends - parts, owner);
      const int keys = split_keys(params, unit.sequence.length);
      int group;
      if (in_turns) {
        unit.split = params.tile_groups.divide(rank);
        group = rank - unit.split * params.tile_groups.value;
        unit.first_key = unit.split * keys;
        unit.last_key = min(unit.first_key + keys, unit.sequence.length);
        at += params.abreast.divide(gridDim.x) - params.longer_runs;
      } else {
        const int steps = tile_steps(unit.sequence), each = split_steps(unit.sequence);
        group = rank / steps;
        const int begin = rank - group * steps;  // of the tile's steps
        unit.split = blocks_of(begin, each);
        unit.first_key = unit.split * keys;
        unit.last_key = min(blocks_of(min(begin + end - at, steps), each) * keys, unit.sequence.length);
        at += steps - begin;
        if (unit.first_key >= unit.last_key) {  // its last split is the block's before
          continue;
        }
      }
      const int tile = tile_of(params, group);
      const int row_tile = params.kv_heads_divisor.divide(tile);
      unit.kv_head = tile - row_tile * params.kv_heads;
      unit.take_rows(params, row_tile);
      return true;
    }
    return false;
  }
};
