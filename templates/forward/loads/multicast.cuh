  // Half a tile for both blocks of the pair; the peer sends the other half. Each block's barrier
  // counts the bytes that arrive in its own shared memory.
  template <int columns, int rows, int slab>
  __device__ __forceinline__ void copy_half(const CUtensorMap& map, TransactionBarrier& full, Element* tile, int row,
                                            int head, int batch, cute::TMA::CacheHintSm90 hint) {
    constexpr uint16_t kBoth = (1 << kCluster) - 1;
    const int half = blockIdx.x % kCluster * (rows / kCluster);
    full.arrive_and_expect_tx(rows * columns * sizeof(Element));
#pragma unroll
    for (int column = 0; column < columns; column += slab) {
      cute::SM90_TMA_LOAD_MULTICAST_4D::copy(&map, reinterpret_cast<uint64_t*>(&full), kBoth,
                                             static_cast<uint64_t>(hint), tile + column * rows + half * slab, column,
                                             row + half, head, batch);
    }
  }

  __device__ __forceinline__ void load_k(const Tile& tile, int block) {
    shared.k_empty[k.stage].wait(k.phase ^ 1);
    copy_half<kHeadDimPadded, kBlockN, kQkSlab>(params.k, shared.k_full[k.stage], shared.k[k.stage], block * kBlockN,
                                                tile.kv_head, of_k(tile), cute::TMA::CacheHintSm90::EVICT_LAST);
    k.advance();
  }

  __device__ __forceinline__ void load_v(const Tile& tile, int block) {
    shared.v_empty[v.stage].wait(v.phase ^ 1);
    copy_half<kHeadDimVPadded, kBlockN, kVSlab>(params.v, shared.v_full[v.stage], shared.v[v.stage], block * kBlockN,
                                                tile.kv_head, of_k(tile), cute::TMA::CacheHintSm90::EVICT_LAST);
    v.advance();
  }
