using Lengths = Sequence;  // seqlen_q and seqlen_k
