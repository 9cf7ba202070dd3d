  // Every other slab of a block of rows, for both blocks of the cluster; the other loads the rest.
  template <int columns, int slab>
  __device__ __forceinline__ void copy_rows(const CUtensorMap& map, TransactionBarrier& full, Element* to, const Tile&, int head, int block) {
    const int row = kRagged - shared.sequence.seqlen_q + block * kBlockM;
#pragma unroll 1
    for (int column = cluster_rank() * slab; column < columns; column += kCluster * slab) {
      cute::SM90_TMA_LOAD_MULTICAST_5D::copy(&map, reinterpret_cast<uint64_t*>(&full), (1 << kCluster) - 1,
                                             static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST),
                                             to + column * kBlockM, column, row, head, kRagged, shared.sequence.end_q);
    }
  }

  // K, and what dQ needs of the other block's.
  __device__ __forceinline__ void load_k(const Tile& tile) {
    constexpr auto kOnce = cute::TMA::CacheHintSm90::EVICT_FIRST;
    shared.k_full.arrive_and_expect_tx(sizeof(shared.k) + sizeof(shared.k_peer));
    const int peer_key = tile.first_key + (1 - 2 * cluster_rank()) * kBlockN, half = kHeadDimPadded / kCluster;
    const int row = kRagged - shared.sequence.seqlen_k + peer_key;
#pragma unroll 1
    for (int column = 0; column < half; column += kQkSlab) {
      cute::SM90_TMA_LOAD_5D::copy(&params.k, reinterpret_cast<uint64_t*>(&shared.k_full), static_cast<uint64_t>(kOnce),
                                   shared.k_peer + column * kBlockN, cluster_rank() * half + column, row, tile.kv_head, kRagged,
                                   shared.sequence.end_k);
    }
    copy_keys<kHeadDimPadded, kQkSlab>(params.k, shared.k_full, shared.k, tile);
  }
