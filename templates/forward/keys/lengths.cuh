using Lengths = Params;  // seqlen_q and seqlen_k: all sequences have the same
