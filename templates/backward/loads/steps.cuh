  static constexpr uint32_t kQBytes = sizeof(SharedStorage::q[0]) + sizeof(Statistics);
  static constexpr uint32_t kDoutBytes = sizeof(SharedStorage::dout[0]);

  // Q of a block of rows, and their statistics; the barrier waits for so many bytes.
  __device__ __forceinline__ void load_q(RingPosition<kStages>& q, const Tile& tile, int head, int block, uint32_t bytes) {
    const RowBlock& rows = row_block_of(params, shared, tile, head, block);
    shared.q_empty[q.stage].wait(q.phase ^ 1);
    shared.q_full[q.stage].arrive_and_expect_tx(bytes);
    copy_rows<kHeadDimPadded, kQkSlab>(params.q, shared.q_full[q.stage], shared.q[q.stage], tile, head, block);
    cute::SM90_BULK_COPY_G2S::copy(rows.statistics, reinterpret_cast<uint64_t*>(&shared.q_full[q.stage]), shared.statistics[q.stage], sizeof(Statistics));
  }

  // And dO.
  __device__ __forceinline__ void load_dout(RingPosition<kDoStages>& dout, const Tile& tile, int head, int block, uint32_t bytes) {
    shared.dout_empty[dout.stage].wait(dout.phase ^ 1);
    shared.dout_full[dout.stage].arrive_and_expect_tx(bytes);
    copy_rows<kHeadDimVPadded, kVSlab>(params.dout, shared.dout_full[dout.stage], shared.dout[dout.stage], tile, head, block);
  }
