// Calls a rendered forward kernel of any revision, whatever the layout of its struct: fields go by name.
//
//   nvcc … -include <slug>.cu -DFAGEN_FUNCTION=fagen_<slug> -c adapter.cu

#include <cstdint>

template <class Args>
void set_strides(Args& a, const int64_t* s) {
  a.q_stride_batch = s[0], a.q_stride_seq = s[1], a.q_stride_head = s[2];
  a.k_stride_batch = s[3], a.k_stride_seq = s[4], a.k_stride_head = s[5];
  a.v_stride_batch = s[6], a.v_stride_seq = s[7], a.v_stride_head = s[8];
  a.out_stride_batch = s[9], a.out_stride_seq = s[10], a.out_stride_head = s[11];
  a.lse_stride_batch = s[12], a.lse_stride_head = s[13];
}

// Chosen where the struct has descales: older 16-bit kernels have none.
template <class Args>
auto set_descales(Args& a, void* const* p, const int64_t* s, int) -> decltype((void)a.q_descale) {
  a.q_descale = static_cast<decltype(a.q_descale)>(p[0]);
  a.k_descale = static_cast<decltype(a.k_descale)>(p[1]);
  a.v_descale = static_cast<decltype(a.v_descale)>(p[2]);
  a.q_descale_stride_batch = s[0], a.q_descale_stride_head = s[1];
  a.k_descale_stride_batch = s[2], a.k_descale_stride_head = s[3];
  a.v_descale_stride_batch = s[4], a.v_descale_stride_head = s[5];
}
template <class Args>
void set_descales(Args&, void* const*, const int64_t*, long) {}

// Chosen where a descale has a stride from block to block, which is 1.
template <class Args>
auto set_block_strides(Args& a, int) -> decltype((void)a.q_descale_stride_block) {
  a.q_descale_stride_block = a.k_descale_stride_block = a.v_descale_stride_block = 1;
}
template <class Args>
void set_block_strides(Args&, long) {}

// Chosen where the struct has a workspace: larger than any kernel's, and zeros.
template <class Args>
auto set_workspace(Args& a, void* p, int) -> decltype((void)a.workspace) {
  a.workspace = p, a.workspace_bytes = int64_t(1) << 26;
}
template <class Args>
void set_workspace(Args&, void*, long) {}

// pointers: q, k, v, out, lse, descales of q, k and v, then a workspace. strides: of q, k, v and out (batch, seq, head), of lse
// (batch, head), of the descales (batch, head). sizes: batch, heads, kv_heads, seqlen_q, seqlen_k.
extern "C" int call(void* const* pointers, const int64_t* strides, const int32_t* sizes, float scale, void* stream) {
  FagenForwardArgs a = {};
  a.struct_bytes = sizeof(a);
#ifdef FAGEN_FORWARD_ARGS
  a.version = FAGEN_FORWARD_ARGS;
#endif
  a.q = pointers[0], a.k = pointers[1], a.v = pointers[2], a.out = pointers[3];
  a.lse = static_cast<decltype(a.lse)>(pointers[4]);
  set_strides(a, strides);
  set_descales(a, pointers + 5, strides + 14, 0);
  set_block_strides(a, 0);
  set_workspace(a, pointers[8], 0);
  a.batch = sizes[0], a.heads = sizes[1], a.kv_heads = sizes[2], a.seqlen_q = sizes[3], a.seqlen_k = sizes[4];
  a.scale = scale;
  return FAGEN_FUNCTION(&a, stream);
}
