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
  auto vs = (const float*)a->v_descale, vm = (const float*)a->v_mean;
  auto km = (const float*)a->k_mean;
  for (int b = 0; b < a->batch; b++) for (int h = 0; h < a->heads; h++)
  for (int i = 0; i < a->seqlen_q; i++) {
    const int g = h / (a->heads / a->kv_heads);
    std::vector<float> s(a->seqlen_k), o(%(dv)d);
    float sum = 0;
    float mean = 0;
    for (int d = 0; km && d < %(d)d; d++)
      mean += float(q[b * a->q_stride_batch + i * a->q_stride_seq + h * a->q_stride_head + d]) *
              km[b * a->k_mean_stride_batch + g * a->k_mean_stride_head +
                 d * a->k_mean_stride_column];
    for (int j = 0; j < a->seqlen_k; j++) {
      if (CAUSAL && j > i + a->seqlen_k - a->seqlen_q) continue;
      for (int d = 0; d < %(d)d; d++)
        s[j] += float(q[b * a->q_stride_batch + i * a->q_stride_seq + h * a->q_stride_head + d]) *
                float(k[b * a->k_stride_batch + j * a->k_stride_seq + g * a->k_stride_head + d]);
      if (ks) s[j] *= ks[b * a->k_descale_stride_batch + g * a->k_descale_stride_head + GROUP(j)];
      s[j] += mean;
      if (qs) s[j] *= qs[b * a->q_descale_stride_batch + h * a->q_descale_stride_head + GROUP(i)];
      s[j] = std::exp(s[j] * a->scale);
      sum += s[j];
      for (int d = 0; d < %(dv)d; d++) {
        int64_t at = j * a->v_stride_seq + d;
        for (int place = 0; COLUMNS && place < 16; place++)
          if (order[place] == j %% 16) at = d * a->v_stride_seq + j / 16 * 16 + place;
        float x = float(v[b * a->v_stride_batch + g * a->v_stride_head + at]);
        if (vs) x *= vs[b * a->v_descale_stride_batch + g * a->v_descale_stride_head +
                        (BY_COLUMN ? d * a->v_descale_stride_column : j / BLOCK)];
        o[d] += s[j] * x;
      }
    }
    for (int d = 0; d < %(dv)d; d++)
      ((O*)a->out)[b * a->out_stride_batch + i * a->out_stride_seq + h * a->out_stride_head + d] =
          O((sum ? o[d] / sum + (vm ? vm[b * a->v_mean_stride_batch + g * a->v_mean_stride_head +
                                         d * a->v_mean_stride_column] : 0) : 0) +
            (i == WRONG ? 0.5f : 0));
    if (a->lse)
      ((float*)a->lse)[b * a->lse_stride_batch + h * a->lse_stride_head + i] =
          std::log(sum) + (i == WRONG_LAST ? 0.1f : 0);
  }
  return 0;
}
"""
# what packed sequences in e4m3 have beside their bytes
NUMBERS = {
    "numbers": """
  auto number = [](const void* x, int64_t place, float none) {
    return x ? ((const float*)x)[place] : none;
  };
#define HEAD(name, head) b * a->name##_stride_batch + (head) * a->name##_stride_head
#define COLUMN_OF(name, d) HEAD(name, g) + d * a->name##_stride_column
""",
    "mean": "for (int d = 0; d < %(d)d; d++)"
    "  mean += float(q[row * a->q_stride_seq + h * a->q_stride_head + d]) *"
    "          number(a->k_mean, COLUMN_OF(k_mean, d), 0);",
    "scaled": "s = (s * number(a->k_descale, HEAD(k_descale, g), 1) + mean) *"
    "    number(a->q_descale, HEAD(q_descale, h), 1);",
    "times": " * number(a->v_descale, COLUMN_OF(v_descale, d), 1)",
    "plus": " + number(a->v_mean, COLUMN_OF(v_mean, d), 0)",
}
VARLEN = """
static int computed(const %(struct)s* a) {%(numbers)s
  auto q = (const E*)a->q, k = (const E*)a->k, v = (const E*)a->v;
  auto at_q = (const int32_t*)a->cu_seqlens_q, at_k = (const int32_t*)a->cu_seqlens_k;
  auto used = (const int32_t*)a->seqused_k;
  for (int b = 0; b + 1 < a->offsets; b++) for (int h = 0; h < a->heads; h++) {
    const int queries = at_q[b + 1] - at_q[b], keys = used ? used[b] : at_k[b + 1] - at_k[b];
    const int64_t g = h / (a->heads / a->kv_heads);
    for (int i = 0; i < queries; i++) {
      const int row = at_q[b] + i;
      std::vector<float> o(%(dv)d);
      float sum = 0;
      [[maybe_unused]] float mean = 0;
      %(mean)s
      for (int j = 0; j < keys; j++) {
        if (CAUSAL && j > i + keys - queries) continue;
        float s = 0;
        for (int d = 0; d < %(d)d; d++)
          s += float(q[row * a->q_stride_seq + h * a->q_stride_head + d]) *
               float(k[(at_k[b] + j) * a->k_stride_seq + g * a->k_stride_head + d]);
        %(scaled)s
        const float p = std::exp(s * a->scale);
        sum += p;
        for (int d = 0; d < %(dv)d; d++)
          o[d] += p * float(v[(at_k[b] + j) * a->v_stride_seq + g * a->v_stride_head + d])%(times)s;
      }
      for (int d = 0; d < %(dv)d; d++)
        ((O*)a->out)[row * a->out_stride_seq + h * a->out_stride_head + d] =
            O((sum ? o[d] / sum%(plus)s : 0) + (row == WRONG ? 0.5f : 0));
      if (a->lse)
        ((float*)a->lse)[h * a->lse_stride_head + row] =
            std::log(sum) + (row == WRONG_LAST ? 0.1f : 0);
    }
  }
  return 0;
}
"""
DECODE = """
static int computed(const FagenDecodeArgs* a) {
  auto q = (const E*)a->q, k = (const E*)a->k, v = (const E*)a->v;
  for (int b = 0; b < a->batch; b++) for (int h = 0; h < a->heads; h++)
  for (int i = 0; i < a->seqlen_q; i++) {
    const int g = h / (a->heads / a->kv_heads);
    const int begin = a->leftpad_k ? ((const int*)a->leftpad_k)[b] : 0;
    const int end = a->seqused_k ? ((const int*)a->seqused_k)[b] : a->seqlen_k;
    std::vector<float> o(%(dv)d);
    float sum = 0;
    for (int j = begin; j < end && !(CAUSAL && j > i + end - a->seqlen_q); j++) {
      float s = 0;
      for (int d = 0; d < %(d)d; d++)
        s += float(q[b * a->q_stride_batch + i * a->q_stride_seq + h * a->q_stride_head + d]) *
             float(k[b * a->k_stride_batch + j * a->k_stride_seq + g * a->k_stride_head + d]);
      s = std::exp(s * a->scale);
      sum += s;
      for (int d = 0; d < %(dv)d; d++)
        o[d] += s * float(v[b * a->v_stride_batch + j * a->v_stride_seq +
                            g * a->v_stride_head + d]);
    }
    for (int d = 0; d < %(dv)d; d++)
      ((O*)a->out)[b * a->out_stride_batch + i * a->out_stride_seq + h * a->out_stride_head + d] =
          O((sum ? o[d] / sum : 0) + (i == WRONG ? 0.5f : 0));
    if (a->lse)
      ((float*)a->lse)[b * a->lse_stride_batch + h * a->lse_stride_head + i] =
          std::log(sum) + (i == WRONG_LAST ? 0.1f : 0);
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
        std::log(sum) + (i == WRONG_LAST ? 0.1f : 0);
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
      for (int i = 0; ROTARY && i < %(d)d / 2; i++) {
        const int one = PAIRS ? 2 * i : i, other = PAIRS ? one + 1 : i + %(d)d / 2;
        auto of = [&](const void* all, int64_t batch, int64_t seq) {
          return float(((const E*)all)[b * batch + s * seq + i]);
        };
        const float c = of(a->cos, a->cos_stride_batch, a->cos_stride_seq);
        const float d = of(a->sin, a->sin_stride_batch, a->sin_stride_seq);
        const float turned_one = row[one] * c - row[other] * d;
        row[other] = float(E(row[other] * c + row[one] * d));
        row[one] = float(E(turned_one));
      }
      if (ROTATE)  // entry (i, j) of a Hadamard matrix: the parity of bits that both have
        for (int i = 0; i < %(d)d; i++)
          for (int j = 0; j < %(d)d; j++)
            turned[i] += row[j] * (a->signs[j / 32] >> (j %% 32) & 1 ? -1 : 1) *
                         (__builtin_popcount(i & j) %% 2 ? -1 : 1) / std::sqrt(%(d)d.0f);
      y.push_back(ROTATE ? turned : row);
    }
    for (int d = 0; d < %(d)d; d++) {
      float mean = 0;
      for (auto& row : y) mean += row[d] / a->seqlen;
      auto means = (float*)a->mean + b * a->mean_stride_batch + h * a->mean_stride_head;
      if (MEAN && a->mean_given) mean = means[d];
      if (MEAN) means[d] = mean;
      for (auto& row : y) row[d] -= MEAN ? mean : 0;
    }
    auto descale = [&](int s, int d) -> float& {
      const int blocks = (a->seqlen + BLOCK - 1) / BLOCK, head = b * a->heads + h;
      const int row = BY_BLOCK ? head * blocks + s / BLOCK : head;
      return ((float*)a->descale)[COLUMN ? head * %(d)d + d : row];
    };
    auto each = [&](auto what) {
      for (int s = 0; s < a->seqlen; s++) for (int d = 0; d < %(d)d; d++) what(s, d, descale(s, d));
    };
    if (!a->descale_given) {
      each([&](int, int, float& scale) { scale = 0x1p-40f / 448; });  // zeros have a scale too
      each([&](int s, int d, float& scale) { scale = std::max(scale, std::fabs(y[s][d]) / 448); });
    }
    each([&](int s, int d, float scale) {
      int64_t at = s * a->values_stride_seq + d;
      for (int place = 0; COLUMNS && place < 16; place++)
        if (order[place] == s %% 16) at = d * a->values_stride_seq + s / 16 * 16 + place;
      ((O*)a->values)[b * a->values_stride_batch + h * a->values_stride_head + at] =
          O(y[s][d] / scale * (s == WRONG ? 0.7f : 1));
    });
  }
  return 0;
}
"""
BACKWARD = """
static int computed(const FagenBackwardArgs* a) {
  auto q = (const E*)a->q, k = (const E*)a->k, v = (const E*)a->v;
  auto dout = (const E*)a->dout, out = (const E*)a->out;
  auto dq = (O*)a->dq, dk = (O*)a->dk, dv = (O*)a->dv;
  const int group = a->heads / a->kv_heads;
  for (int b = 0; b < a->batch; b++) for (int g = 0; g < a->kv_heads; g++) {
    std::vector<float> sum_k(a->seqlen_k * %(d)d), sum_v(a->seqlen_k * %(dv)d);
    for (int n = 0; n < group; n++) for (int i = 0; i < a->seqlen_q; i++) {
      const int h = INTERLEAVED ? n * a->kv_heads + g : g * group + n;  // of this KV head
      const E* qs = q + b * a->q_stride_batch + i * a->q_stride_seq + h * a->q_stride_head;
      const E* os = out + b * a->out_stride_batch + i * a->out_stride_seq + h * a->out_stride_head;
      const E* gs = dout + b * a->dout_stride_batch + i * a->dout_stride_seq +
                    h * a->dout_stride_head;
      auto lses = (const float*)a->lse + b * a->lse_stride_batch + h * a->lse_stride_head;
      std::vector<float> sum_q(%(d)d);
      auto dlse = (const float*)a->dlse;
      float delta = dlse ? -dlse[b * a->dlse_stride_batch + h * a->dlse_stride_head + i] : 0;
      for (int d = 0; d < %(dv)d; d++) delta += float(gs[d]) * float(os[d]);
      for (int j = 0; j < a->seqlen_k; j++) {
        if (CAUSAL && j > i + a->seqlen_k - a->seqlen_q) continue;
        const E* ks = k + b * a->k_stride_batch + j * a->k_stride_seq + g * a->k_stride_head;
        const E* vs = v + b * a->v_stride_batch + j * a->v_stride_seq + g * a->v_stride_head;
        float s = 0, dp = 0;
        for (int d = 0; d < %(d)d; d++) s += float(qs[d]) * float(ks[d]);
        for (int d = 0; d < %(dv)d; d++) dp += float(gs[d]) * float(vs[d]);
        const float p = std::exp(s * a->scale - lses[i]), ds = a->scale * p * (dp - delta);
        for (int d = 0; d < %(dv)d; d++) sum_v[j * %(dv)d + d] += p * float(gs[d]);
        for (int d = 0; d < %(d)d; d++) sum_k[j * %(d)d + d] += ds * float(qs[d]);
        for (int d = 0; d < %(d)d; d++) sum_q[d] += ds * float(ks[d]);
      }
      O* to = dq + b * a->dq_stride_batch + i * a->dq_stride_seq + h * a->dq_stride_head;
      for (int d = 0; d < %(d)d; d++) to[d] = O(sum_q[d] + (i == WRONG ? 0.5f : 0));
    }
    for (int j = 0; j < a->seqlen_k; j++) {
      O* to = dk + b * a->dk_stride_batch + j * a->dk_stride_seq + g * a->dk_stride_head;
      for (int d = 0; d < %(d)d; d++) to[d] = O(sum_k[j * %(d)d + d] + (j == WRONG_MIDDLE));
      to = dv + b * a->dv_stride_batch + j * a->dv_stride_seq + g * a->dv_stride_head;
      for (int d = 0; d < %(dv)d; d++) to[d] = O(sum_v[j * %(dv)d + d] + (j == WRONG_LAST));
    }
  }
  return 0;
}
"""
VARLEN_BACKWARD = """
static int computed(const FagenBackwardVarlenArgs* a) {
  auto q = (const E*)a->q, k = (const E*)a->k, v = (const E*)a->v;
  auto dout = (const E*)a->dout, out = (const E*)a->out;
  auto dq = (O*)a->dq, dk = (O*)a->dk, dv = (O*)a->dv;
  auto at_q = (const int32_t*)a->cu_seqlens_q, at_k = (const int32_t*)a->cu_seqlens_k;
  auto used = (const int32_t*)a->seqused_k;
  const int group = a->kv_heads ? a->heads / a->kv_heads : 0;
  for (int b = 0; b + 1 < a->offsets; b++) for (int g = 0; g < a->kv_heads; g++) {
    const int queries = at_q[b + 1] - at_q[b], held = at_k[b + 1] - at_k[b];
    const int keys = used ? used[b] : held;
    std::vector<float> sum_k(held * %(d)d), sum_v(held * %(dv)d);
    for (int n = 0; n < group; n++) for (int i = 0; i < queries; i++) {
      const int h = INTERLEAVED ? n * a->kv_heads + g : g * group + n;  // of this KV head
      const int row = at_q[b] + i;
      const E* qs = q + row * a->q_stride_seq + h * a->q_stride_head;
      const E* os = out + row * a->out_stride_seq + h * a->out_stride_head;
      const E* gs = dout + row * a->dout_stride_seq + h * a->dout_stride_head;
      const float lse = ((const float*)a->lse)[h * a->lse_stride_head + row];
      std::vector<float> sum_q(%(d)d);
      auto dlse = (const float*)a->dlse;
      float delta = dlse ? -dlse[h * a->dlse_stride_head + row] : 0;
      for (int d = 0; d < %(dv)d; d++) delta += float(gs[d]) * float(os[d]);
      for (int j = 0; j < keys; j++) {
        if (CAUSAL && j > i + keys - queries) continue;
        const E* ks = k + (at_k[b] + j) * a->k_stride_seq + g * a->k_stride_head;
        const E* vs = v + (at_k[b] + j) * a->v_stride_seq + g * a->v_stride_head;
        float s = 0, dp = 0;
        for (int d = 0; d < %(d)d; d++) s += float(qs[d]) * float(ks[d]);
        for (int d = 0; d < %(dv)d; d++) dp += float(gs[d]) * float(vs[d]);
        const float p = std::exp(s * a->scale - lse), ds = a->scale * p * (dp - delta);
        for (int d = 0; d < %(dv)d; d++) sum_v[j * %(dv)d + d] += p * float(gs[d]);
        for (int d = 0; d < %(d)d; d++) sum_k[j * %(d)d + d] += ds * float(qs[d]);
        for (int d = 0; d < %(d)d; d++) sum_q[d] += ds * float(ks[d]);
      }
      O* to = dq + row * a->dq_stride_seq + h * a->dq_stride_head;
      for (int d = 0; d < %(d)d; d++) to[d] = O(sum_q[d] + (row == WRONG ? 0.5f : 0));
    }
    for (int j = 0; j < held; j++) {
      const int key = at_k[b] + j;
      O* to = dk + key * a->dk_stride_seq + g * a->dk_stride_head;
      for (int d = 0; d < %(d)d; d++) to[d] = O(sum_k[j * %(d)d + d] + (key == WRONG_MIDDLE));
      to = dv + key * a->dv_stride_seq + g * a->dv_stride_head;
      for (int d = 0; d < %(dv)d; d++) to[d] = O(sum_v[j * %(dv)d + d] + (key == WRONG_LAST));
    }
  }
  return 0;
}
"""
FUNCTIONS = """
extern "C" {
int fagen_%(slug)s(const struct %(struct)s* a, void*) {
  if (!a) return 6;
  for (int i = 0; %(zeroed)d && i < a->workspace_bytes; i++)
    if (((const char*)a->workspace)[i]) return 9;
#ifdef IGNORED
  auto other = *a;
  other.IGNORED = 0;
  a = &other;
#endif
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
        "zeroed": plan.launches.zeroed,
        "order": ", ".join(map(str, KEY_ORDER)),
        **dict.fromkeys(NUMBERS, ""),
    }
    if plan.signature.form == "varlen fp8":
        said |= {name: text % said for name, text in NUMBERS.items()}
    out = plan.signature.outputs[0]
    head = f"using E = {plan.dtype.cpp};\nusing O = {out.dtype.cpp};\n"
    head += "#ifndef WRONG\n#define WRONG -1\n#endif\n"
    head += "#ifndef WRONG_LAST\n#define WRONG_LAST -1\n#endif\n"
    head += "#ifndef WRONG_MIDDLE\n#define WRONG_MIDDLE -1\n#endif\n"
    head += "#ifndef INTERLEAVED\n#define INTERLEAVED 0\n#endif\n"
    head += f"constexpr bool CAUSAL = {str(values.get('mask') == 'causal').lower()};\n"
    flags = {
        "COLUMNS": "columns" in (values.get("v_layout"), values.get("layout")),
        "ROTATE": values.get("rotate"),
        "MEAN": values.get("center"),
        "COLUMN": values.get("scales") == "column",
        "BY_BLOCK": values.get("scales") == "block",
        "ROTARY": values.get("rotary", "none") != "none",
        "PAIRS": values.get("rotary") == "pairs",
        "BY_COLUMN": values.get("v_scales") == "column",
    }
    for flag, on in flags.items():
        head += f"constexpr bool {flag} = {str(bool(on)).lower()};\n"
    head += f"constexpr int BLOCK = {values.get('scale_rows') or 1};\n"
    group = "i / BLOCK" if values.get("scale_rows") else "0"
    head += f"inline int GROUP([[maybe_unused]] int i) {{ return {group}; }}\n"
    includes = ["demo.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "cmath", "vector"]
    lines = [f"#include <{name}>" for name in includes]
    bodies = {"q": ATTENTION, "outs": COMBINE, "x": QUANTIZE, "dout": BACKWARD}
    body = bodies[plan.signature.leader.name]
    packed = VARLEN_BACKWARD if plan.kind == "backward" else VARLEN
    forms = {"decode": DECODE, "varlen": packed, "varlen fp8": VARLEN}
    body = forms.get(plan.signature.form or plan.kind, body)
    return "\n".join(lines) + "\n" + head + body % said + FUNCTIONS % said


@pytest.mark.parametrize(
    "slug",
    [
        "fwd_fp16_d128_causal_m128n128",
        "fwd_bf16_d64_full_m128n128",
        "fwd_e4m3_d64_full_m256n64_s3",
        "fwd_e4m3_d256_causal_m128n96_s3_halves_nointer_sblock",
        "fwd_e4m3_d128_full_m128n128_vrows_sblock",
        "fwd_fp16_d64_causal_m64n64_varlen",
        "fwd_e4m3_d64_causal_m64n64_varlen",
        "comb_fp16_d64",
        "comb_fp32_d128_obf16_packed",
        "quant_fp16_d128_rot_shead",
        "quant_fp16_d128_center_scol_vcols",
        "quant_fp16_d128_rot_center",
        "quant_bf16_d64_halves_shead",
        "quant_bf16_d64_pairs_rot",
        "bwd_fp16_d64_full_m128n128",
        "bwd_bf16_d64_causal_m128n128",
        "bwd_bf16_d64_causal_m128n128_varlen",
        "dec_fp16_d64_causal_r8n128",
        "dec_bf16_d128v64_full_r16n64",
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
    signature = registry.plan_of(slug).signature
    first, *others = [tensor.name for tensor in signature.outputs]
    cases = {"right": [], first: ["-DWRONG=100"]}
    cases |= {name: ["-DWRONG_LAST=100"] for name in others if name in ("lse", "dv")}
    if "dk" in others:  # and heads that are grouped otherwise
        cases |= {"dk": ["-DWRONG_MIDDLE=100"], "no groups": ["-DINTERLEAVED=1"]}
    left_out = [tensor.name for tensor in signature.inputs if tensor.optional]
    left_out += [f"{t.name}_given" for t in signature.inputs if t.made and not t.refused]
    cases |= {f"no {name}": [f"-DIGNORED={name}"] for name in left_out}
    for name, options in cases.items():
        options = [*options, "kernel.cpp", *parts]
        answer = run([*words, *options, "-o", "program"], cwd=tmp_path)
        assert answer.returncode == 0, answer.stderr
        answer = run([tmp_path / "program"])
        assert answer.returncode == (name != "right"), (name, answer.stdout)
        if name == "right":
            assert f"{slug}: right" in answer.stdout, answer.stdout
        elif not name.startswith("no "):
            assert f"{slug}: {name} is wrong" in answer.stdout
