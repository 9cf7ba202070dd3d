// Units by their number, dealt to thread blocks in turns. Those of a sequence follow each other, KV heads fastest, so that
// blocks that run at a time read neighbouring memory and every sequence is dealt to all SMs. Of 32 sequences those come first
// that are one split of several blocks, beside splits of others that have one: they take longest.
struct Units {
  const Params& params;
  int window = 0;  // of 32 sequences, one for each lane: the first of them
  int before = 0;  // units of the sequences before
  Sequence own;    // the lane's
  int begin;       // units of the window before those of the lane's sequence,
  int own_units;   // those,
  int all_units;   // and all

  __device__ __forceinline__ explicit Units(const Params& params) : params(params) { count(); }

  __device__ __forceinline__ int units_of(const Sequence& sequence) const {
    const int splits = params.alone ? sequence.length >= 0 : splits_of(params, sequence.length);
    return splits * params.split_units;
  }

  __device__ __forceinline__ void count() {
    const int batch = window + lane();
    own = batch < params.batch ? sequence_of(params, batch) : Sequence{0, -1};
    own_units = units_of(own);
    int ends = own_units;  // of the lanes up to this one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int others = __shfl_up_sync(0xffffffffu, ends, step);
      ends += lane() >= step ? others : 0;
    }
    all_units = __shfl_sync(0xffffffffu, ends, 31);
    const bool is_long = !params.alone && own.length > kBlockN && own.length <= kMostBlocks * kBlockN;
    const uint32_t longs = __ballot_sync(0xffffffffu, is_long), lanes_before = (1u << lane()) - 1;
    begin = __popc(longs & (is_long ? lanes_before : ~lanes_before)) * params.split_units + (is_long ? 0 : ends - own_units);
  }

  // By all lanes of a warp, with numbers that rise; false: there is none of this number.
  __device__ __forceinline__ bool find(int number, Unit& unit) {
    while (number >= before + all_units) {
      before += all_units;
      window += 32;
      if (window >= params.batch) {
        return false;
      }
      count();
    }
    int rank = number - before - begin;
    const int owner = __ffs(__ballot_sync(0xffffffffu, rank >= 0 && rank < own_units)) - 1;
    rank = __shfl_sync(0xffffffffu, rank, owner);
    unit.batch = window + owner;
    unit.sequence.first = __shfl_sync(0xffffffffu, own.first, owner);
    unit.sequence.length = __shfl_sync(0xffffffffu, own.length, owner);
    const int rest = params.kv_heads_divisor.divide(rank);
    unit.kv_head = rank - rest * params.kv_heads;
    unit.split = params.row_tiles.divide(rest);
    const int row_tile = rest - unit.split * params.row_tiles.value;
    const int keys = split_keys(params, unit.sequence.length);
    unit.first_key = unit.split * keys;
    unit.last_key = min(unit.first_key + keys, unit.sequence.length);
    unit.take_rows(params, row_tile);
    return true;
  }
};
