  params.rows = a.batch * a.seqlen * a.heads;
