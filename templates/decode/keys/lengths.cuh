// How many queries there are, and keys in a sequence.
struct Lengths {
  int seqlen_q, seqlen_k;
};
