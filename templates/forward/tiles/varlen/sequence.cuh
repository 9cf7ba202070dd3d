enum : int { kRagged = 1 << 30 };  // rows of a tensor map, where every sequence ends
enum : int { kAround = 2 };        // sequences that rows of no sequence are taken for: those behind all others, and before

// One of the sequences that lie one after another: how many rows it has, and behind which it ends.
struct Sequence {
  int seqlen_q, seqlen_k, end_q, end_k;
};
