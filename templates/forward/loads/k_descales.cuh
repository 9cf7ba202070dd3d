// The descale of keys that share one.
struct Descales {
  float k;

  __device__ __forceinline__ void read(const Params& params, const Tile& tile, int group) {
    k = __ldg(params.k_scale.at(tile.batch, tile.kv_head) + group);
  }

  __device__ __forceinline__ void write(float& scale) const { scale = k; }
};
