  params.rows = a.seqlen * a.heads;
  params.sequences_per_row = float(a.batch) / float(a.seqlen);
