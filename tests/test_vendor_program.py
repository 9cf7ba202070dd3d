"""The test program of a vendored folder, run on a CPU over kernels that are right, or wrong."""

from pathlib import Path

import pytest

from fagen import registry, vendor
from fagen.process import run
from fagen.vendor import source
from fagen.vocab import KEY_ORDER

pytestmark = pytest.mark.long

CUDA = Path("/usr/local/cuda/include")
RUNTIME = """\
#include <cuda_runtime.h>
#include <cstdlib>
extern "C" {
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 0;
  return cudaSuccess;
}
cudaError_t cudaMallocManaged(void** data, size_t size, unsigned) {
  return *data = std::malloc(size), cudaSuccess;
}
cudaError_t cudaFree(void* data) { return std::free(data), cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
}
"""
# Textbook loops in fp32, written from what the header says of each argument.
ATTENTION = """
static int computed(const FagenForwardArgs* a) {
  static const int order[16] = {%(order)s};
  auto q = (const E*)a->q, k = (const E*)a->k, v = (const E*)a->v;
  auto qs = (const float*)a->q_descale, ks = (const float*)a->k_descale;
  auto vs = (const float*)a->v_descale;
  for (int b = 0; b < a->batch; b++) for (int h = 0; h < a->heads; h++)
  for (int i = 0; i < a->seqlen_q; i++) {
    const int g = h / (a->heads / a->kv_heads);
    std::vector<float> s(a->seqlen_k), o(%(dv)d);
    float sum = 0;
    for (int j = 0; j < a->seqlen_k; j++) {
      if (CAUSAL && j > i + a->seqlen_k - a->seqlen_q) continue;
      for (int d = 0; d < %(d)d; d++)
        s[j] += float(q[b * a->q_stride_batch + i * a->q_stride_seq + h * a->q_stride_head + d]) *
                float(k[b * a->k_stride_batch + j * a->k_stride_seq + g * a->k_stride_head + d]);
      s[j] *= a->scale;
      if (qs) s[j] *= qs[b * a->q_descale_stride_batch + h * a->q_descale_stride_head + i / BLOCK];
      if (ks) s[j] *= ks[b * a->k_descale_stride_batch + g * a->k_descale_stride_head + j / BLOCK];
      s[j] = std::exp(s[j]);
      sum += s[j];
      for (int d = 0; d < %(dv)d; d++) {
        int64_t at = j * a->v_stride_seq + d;
        for (int place = 0; COLUMNS && place < 16; place++)
          if (order[place] == j %% 16) at = d * a->v_stride_seq + j / 16 * 16 + place;
        float x = float(v[b * a->v_stride_batch + g * a->v_stride_head + at]);
        if (vs) x *= vs[b * a->v_descale_stride_batch + g * a->v_descale_stride_head + j / BLOCK];
        o[d] += s[j] * x;
      }
    }
    for (int d = 0; d < %(dv)d; d++)
      ((O*)a->out)[b * a->out_stride_batch + i * a->out_stride_seq + h * a->out_stride_head + d] =
          O((sum ? o[d] / sum : 0) + (i == WRONG ? 0.5f : 0));
    ((float*)a->lse)[b * a->lse_stride_batch + h * a->lse_stride_head + i] =
        std::log(sum) + (i == WRONG_LSE ? 0.1f : 0);
  }
  return 0;
}
"""
COMBINE = """
static int computed(const FagenCombineArgs* a) {
  auto outs = (const E*)a->outs;
  auto lses = (const float*)a->lses;
  auto cu = (const int*)a->cu_seqlens;
  auto splits = (const int*)a->num_splits;
  for (int b = 0; b < a->batch; b++) for (int h = 0; h < a->heads; h++)
  for (int i = cu ? cu[b] : 0; i < (cu ? cu[b + 1] : a->seqlen); i++) {
    float sum = 0;
    std::vector<float> o(%(d)d);
    for (int s = 0; s < (cu ? splits[b] : a->splits); s++) {
      const float w = std::exp(lses[s * a->lses_stride_split + (cu ? 0 : b * a->lses_stride_batch) +
                                    h * a->lses_stride_head + i]);
      sum += w;
      for (int d = 0; d < %(d)d; d++)
        o[d] += w * float(outs[s * a->outs_stride_split + (cu ? 0 : b * a->outs_stride_batch) +
                               i * a->outs_stride_seq + h * a->outs_stride_head + d]);
    }
    for (int d = 0; d < %(d)d; d++)
      ((O*)a->out)[(cu ? 0 : b * a->out_stride_batch) + i * a->out_stride_seq +
                   h * a->out_stride_head + d] = O(o[d] / sum + (i == WRONG ? 0.5f : 0));
    ((float*)a->lse)[(cu ? 0 : b * a->lse_stride_batch) + h * a->lse_stride_head + i] =
        std::log(sum) + (i == WRONG_LSE ? 0.1f : 0);
  }
  return 0;
}
"""
QUANTIZE = """
static int computed(const FagenQuantizeArgs* a) {
  static const int order[16] = {%(order)s};
  auto x = (const E*)a->x;
  for (int b = 0; b < a->batch; b++) for (int h = 0; h < a->heads; h++) {
    std::vector<std::vector<float>> y;
    for (int s = 0; s < a->seqlen; s++) {
      std::vector<float> row(%(d)d), turned(%(d)d);
      for (int d = 0; d < %(d)d; d++)
        row[d] = float(x[b * a->x_stride_batch + s * a->x_stride_seq + h * a->x_stride_head + d]);
      if (ROTATE)  // entry (i, j) of a Hadamard matrix: the parity of bits that both have
        for (int i = 0; i < %(d)d; i++)
          for (int j = 0; j < %(d)d; j++)
            turned[i] += row[j] * (a->signs[j / 32] >> (j %% 32) & 1 ? -1 : 1) *
                         (__builtin_popcount(i & j) %% 2 ? -1 : 1) / std::sqrt(%(d)d.0f);
      y.push_back(ROTATE ? turned : row);
    }
    float head = 0;
    for (int d = 0; d < %(d)d; d++) {
      float mean = 0, column = 0x1p-40f;  // zeros have a scale too
      for (auto& row : y) mean += row[d] / a->seqlen;
      for (auto& row : y) row[d] -= MEAN ? mean : 0;
      for (auto& row : y) column = std::max(column, std::fabs(row[d]));
      head = std::max(head, column);
      if (MEAN) ((float*)a->mean)[b * a->mean_stride_batch + h * a->mean_stride_head + d] = mean;
      if (COLUMN) ((float*)a->descale)[(b * a->heads + h) * %(d)d + d] = column / 448;
    }
    if (!COLUMN) ((float*)a->descale)[b * a->heads + h] = head / 448;
    for (int s = 0; s < a->seqlen; s++) for (int d = 0; d < %(d)d; d++) {
      const int head_of = b * a->heads + h;
      auto scale = ((const float*)a->descale)[COLUMN ? head_of * %(d)d + d : head_of];
      int64_t at = s * a->values_stride_seq + d;
      for (int place = 0; COLUMNS && place < 16; place++)
        if (order[place] == s %% 16) at = d * a->values_stride_seq + s / 16 * 16 + place;
      ((O*)a->values)[b * a->values_stride_batch + h * a->values_stride_head + at] =
          O(y[s][d] / scale * (s == WRONG ? 0.7f : 1));
    }
  }
  return 0;
}
"""
FUNCTIONS = """
extern "C" {
int fagen_%(slug)s(const struct %(struct)s* a, void*) {
  if (!a) return 6;
  return a->struct_bytes == sizeof(*a) && a->version == %(guard)s ? computed(a) : 1;
}
int64_t fagen_%(slug)s_workspace(const struct %(struct)s* a) { return a ? 4 : -1; }
const char* fagen_%(slug)s_message(int) { return "said"; }
const FagenKernelInfo* fagen_%(slug)s_info(void) {
  static const FagenKernelInfo info = {sizeof(FagenKernelInfo), 0, 0, 0, "%(slug)s", ""};
  return &info;
}
}
"""


def kernel(slug: str) -> str:
    """C++ that computes what a kernel should."""
    plan = registry.plan_of(slug)
    values = plan.schedule.values()
    said = {
        "slug": slug,
        "struct": plan.signature.struct,
        "guard": plan.signature.guard,
        "d": plan.head_dim,
        "dv": values.get("head_dim_v"),
        "order": ", ".join(map(str, KEY_ORDER)),
    }
    out = plan.signature.outputs[0]
    head = f"using E = {plan.dtype.cpp};\nusing O = {out.dtype.cpp};\n"
    head += f"constexpr bool CAUSAL = {str(values.get('mask') == 'causal').lower()};\n"
    flags = {
        "COLUMNS": "columns" in (values.get("v_layout"), values.get("layout")),
        "ROTATE": values.get("rotate"),
        "MEAN": values.get("center"),
        "COLUMN": values.get("scales") == "column",
    }
    for flag, on in flags.items():
        head += f"constexpr bool {flag} = {str(bool(on)).lower()};\n"
    head += f"constexpr int BLOCK = {values.get('scale_rows') or 1};\n"
    includes = ["demo.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "cmath", "vector"]
    lines = [f"#include <{name}>" for name in includes]
    body = {"q": ATTENTION, "outs": COMBINE, "x": QUANTIZE}[plan.signature.leader.name]
    return "\n".join(lines) + "\n" + head + body % said + FUNCTIONS % said


@pytest.mark.parametrize(
    "slug",
    [
        "fwd_fp16_d128_causal_m128n128",
        "fwd_bf16_d64_full_m128n128",
        "fwd_e4m3_d64_full_m256n64_s3",
        "fwd_e4m3_d256_causal_m128n96_s3_halves_nointer_sblock",
        "fwd_e4m3_d128_full_m128n128_vrows_sblock",
        "comb_fp16_d64",
        "comb_fp32_d128_obf16_packed",
        "quant_fp16_d128_rot_shead",
        "quant_fp16_d128_center_scol_vcols",
    ],
)
def test_the_program_tells_right_from_wrong(slug, tmp_path):
    if not CUDA.exists():
        pytest.skip("the CUDA headers are not there")
    found = source.texts(vendor.folder_of(vendor.asked("demo", [registry.from_slug(slug)])))
    for path, text in found.items():
        (tmp_path / Path(path).name).write_text(text)
    (tmp_path / "kernel.cpp").write_text(kernel(slug))
    (tmp_path / "runtime.cpp").write_text(RUNTIME)
    words = ["g++", "-O2", "-std=c++17", "-I.", "-isystem", str(CUDA)]
    for part, options in {
        "program": ["-c", "demo_test.cpp"],
        "dispatch": ["-c", "-xc++", "demo.c"],
        "runtime": ["-c", "runtime.cpp"],
    }.items():
        answer = run([*words, *options, "-o", f"{part}.o"], cwd=tmp_path)
        assert answer.returncode == 0, answer.stderr
    parts = ["program.o", "dispatch.o", "runtime.o"]
    ends = {}
    first, *others = [tensor.name for tensor in registry.plan_of(slug).signature.outputs]
    cases = [("right", -1, -1), (first, 100, -1), *[("lse", -1, 100)] * ("lse" in others)]
    for name, wrong, wrong_lse in cases:
        options = [f"-DWRONG={wrong}", f"-DWRONG_LSE={wrong_lse}", "kernel.cpp", *parts]
        answer = run([*words, *options, "-o", name], cwd=tmp_path)
        assert answer.returncode == 0, answer.stderr
        answer = run([tmp_path / name])
        ends[name] = answer.returncode
        if name != "right":
            assert f"{slug}: {name} is wrong" in answer.stdout
        else:
            assert f"{slug}: right" in answer.stdout, answer.stdout
    assert ends == {"right": 0} | dict.fromkeys(list(ends)[1:], 1)
