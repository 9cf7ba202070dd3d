// Two vendored kernels, of different head dims and dtypes, called from C++: see CMakeLists.txt beside.

#include <attention.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdio>

// Attention over ones: each row of the output is then ones too. Says whether it is, or 2 where the call failed.
template <class T, class Kernel>
int run(Kernel kernel, int head_dim, int32_t* workspace) {
  const int batch = 2, heads = 4, seqlen = 1000, row = heads * head_dim, count = batch * seqlen * row;
  T *x, *out;
  cudaMallocManaged(&x, count * sizeof(T));
  cudaMallocManaged(&out, count * sizeof(T));
  for (int i = 0; i < count; ++i) x[i] = T(1.0f), out[i] = T(0.0f);
  FagenForwardArgs args = {};
  args.struct_bytes = sizeof(args), args.version = FAGEN_FORWARD_ARGS;
  args.workspace = workspace, args.workspace_bytes = 4;
  args.q = args.k = args.v = x, args.out = out;  // no lse is wanted
  args.q_stride_batch = args.k_stride_batch = args.v_stride_batch = args.out_stride_batch = int64_t(seqlen) * row;
  args.q_stride_seq = args.k_stride_seq = args.v_stride_seq = args.out_stride_seq = row;
  args.q_stride_head = args.k_stride_head = args.v_stride_head = args.out_stride_head = head_dim;
  args.batch = batch, args.heads = args.kv_heads = heads, args.seqlen_q = args.seqlen_k = seqlen;
  args.scale = 0.125f;
  const int status = kernel(&args, nullptr);
  std::printf("head dim %d: %s\n", head_dim, attention_message(status));
  if (status != ATTENTION_OK || cudaDeviceSynchronize() != cudaSuccess) return 2;
  int wrong = 0;
  for (int i = 0; i < count; ++i) wrong += float(out[i]) != 1.0f;
  return std::printf("  %d of %d numbers are wrong\n", wrong, count), wrong != 0;
}

int main() {
  int32_t* workspace;  // zeros before the first call; both kernels leave it so
  if (cudaMallocManaged(&workspace, 4) != cudaSuccess) return std::puts("there is no GPU"), 77;
  *workspace = 0;
  return run<__nv_bfloat16>(attention_narrow, 64, workspace) | run<__half>(attention_wide, 128, workspace);
}
