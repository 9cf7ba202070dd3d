  // Issues S and dP of the next Q and dO.
  __device__ __forceinline__ void issue_scores_and_dp(Scores& s, Scores& dp) {
    shared.q_full[q.stage].wait(q.phase);
    issue_statistics(s, dp);
    issue_scores(s, q.stage);
    shared.dout_full[dout().stage].wait(dout().phase);
    wgmma_fence();  // the wait may have been a loop
    issue_dp(dp);
  }

