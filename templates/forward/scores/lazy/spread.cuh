  int spread_first;  // from this block on to the tile's last, maxima are found before P

  // The same while PV of the block before ends; with each_maximum the row maxima are found before P.
  template <bool each_maximum>
  __device__ __forceinline__ void next_scores_under_pv(float (&s)[kBlockN / 2], Probabilities& p, Output& o,
                                                       Softmax& softmax) {
    if (each_maximum) {
      softmax.update_row_max(s);
    }
    finish_pv(o);
    fence_operand(s);  // P's registers are free only now
    if (each_maximum) {
      softmax.exponentiate(s);
      pack_p(p, s);
      softmax.raised = true;
      rescale_output(o, softmax);
    } else {
      next_scores(s, p, o, softmax);
    }
  }

  // Whether the first block's scores are widely spread in most warps of the warpgroup, enough of which see keys enough
  // to tell: all must take the same steps.
  __device__ __forceinline__ bool spread(const Tile& tile, int block, const Softmax& softmax) {
    uint8_t(&votes)[4] = shared.votes[warpgroup];
    const int vote = softmax.spread() | (keys_seen(tile, block) >= kSpreadKeys) << 4;
    if (lane() == 0) {
      votes[threadIdx.x % kWarpgroup / 32] = vote;
    }
    barrier_sync(kStore + warpgroup, kWarpgroup);
    const int counted = votes[0] + votes[1] + votes[2] + votes[3];
    return counted % 16 >= kSpreadWarps && counted / 16 >= kSpreadSeeing;
  }
