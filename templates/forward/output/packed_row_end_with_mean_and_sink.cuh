      const int row = thread_row() + r * 8, query = query_of(row);
      const int number = row - query * params.pack.value;  // of the heads that share the tile
      const float sink = params.sink(tile.head * params.pack.value + number);
      const float mean = params.k_mean.data ? mean_score(tile, row) : 0.f;
      float lse;
      add_sink(sink, softmax.reference(r) + mean, sum, inverse[r], lse);
      of_keys[r] = sum * inverse[r];
      const bool exists = query < params.queries && first_row(tile) + query < seqlen_q(tile);
      if (params.lse && lane() % 4 == 0 && exists) {
        params.lse[lse_begin(tile, number) + first_row(tile) + query] = empty[r] ? sink : lse;
      }
