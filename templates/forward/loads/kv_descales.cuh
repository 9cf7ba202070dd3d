// The descales of keys that share one of K and one of V.
struct Descales {
  float k, v;

  __device__ __forceinline__ void read(const Params& params, const Tile& tile, int group) {
    k = __ldg(params.k_scale.at(tile.batch, tile.kv_head) + group);
    v = __ldg(params.v_scale.at(tile.batch, tile.kv_head) + group);
  }

  __device__ __forceinline__ void write(KeyScales& scales) const {
    scales = {k, log2_approx(v), reciprocal_approx(v)};
  }
};
