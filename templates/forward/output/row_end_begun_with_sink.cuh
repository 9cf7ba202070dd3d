      inverse[r] = reciprocal_approx(sum);
      const int row = first_row(tile) + thread_row() + r * 8;
      if (params.lse && lane() % 4 == 0 && row < seqlen_q(tile)) {
        params.lse[lse_begin(tile) + row] =
            empty[r] ? params.sink(tile.head) : (softmax.reference(r) + log2_approx(sum)) * 0.69314718056f;
      }
