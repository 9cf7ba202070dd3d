  // Issues S and dP of the next Q and dO.
  __device__ __forceinline__ void issue_scores_and_dp(Scores& s, Scores& dp) {
    shared.q_full[q.stage].wait(q.phase);
    issue_scores(s, q.stage);
    shared.dout_full[dout().stage].wait(dout().phase);
    issue_dp(dp);
  }

