// Writes the descales of a block to shared memory. Used by a whole warp: its lanes read those of kBlocks blocks at
// once, and each writes its own when that block comes.
struct ScaleProducer {
  static constexpr int kBlocks = 32 / kGroups;

  const Params& params;
  SharedStorage& shared;
  RingPosition<kStages> k;
  Descales own;

  // Blocks come in the order of the tile, from the last to the first.
  __device__ __forceinline__ void write(const Tile& tile, int block) {
    const int first_lane = block % kBlocks * kGroups;  // of those with this block's descales
    if (block == tile.blocks.last - 1 || block % kBlocks == kBlocks - 1) {
      const int group = min((block * kGroups + lane() - first_lane) * kGroupKeys / kScaleRows, (params.seqlen_k - 1) / kScaleRows);  // keys may end before
      own.read(params, tile, group);
    }
    shared.k_empty[k.stage].wait(k.phase ^ 1);
    __syncwarp();  // no lane misses the phase that another one's arrival ends
    if (lane() >= first_lane && lane() < first_lane + kGroups) {
      own.write(shared.scales[k.stage][lane() - first_lane]);
      shared.k_full[k.stage].arrive();
    }
    k.advance();
  }
};
