      inverse[r] = reciprocal_approx(sum);
      const int row = thread_row() + r * 8, query = query_of(row);
      const float mean = params.lse && params.k_mean.data ? mean_score(tile, row) : 0.f;
      const bool exists = query < params.queries && first_row(tile) + query < seqlen_q(tile);
      if (params.lse && lane() % 4 == 0 && exists) {
        const int64_t head = lse_begin(tile, row - query * params.pack.value);
        params.lse[head + first_row(tile) + query] =
            empty[r] ? -INFINITY : (softmax.reference(r) + log2_approx(sum) + mean) * 0.69314718056f;
      }
