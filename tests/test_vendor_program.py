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
# Textbook loops in fp32, written from what the header says of each argument. Of sequence b queries
# begin at row `top` and keys at row `begin`.
SEQUENCES = {
    "": """
#define SEQUENCES a->batch
#define AT(name, head, row) \\
  (b * a->name##_stride_batch + int64_t(row) * a->name##_stride_seq + \\
   (head) * a->name##_stride_head)
#define LSE(name, head, row) \\
  (b * a->name##_stride_batch + (head) * a->name##_stride_head + (row))
#define SEQUENCE const int top = 0, queries = a->seqlen_q; \\
  const int begin = 0, keys = a->seqlen_k, held = keys;
#define TOP b * queries
""",
    "decode": """
#undef SEQUENCE
#define SEQUENCE const int top = 0, queries = a->seqlen_q; \\
  const int begin = a->leftpad_k ? ((const int*)a->leftpad_k)[b] : 0; \\
  const int keys = (a->seqused_k ? ((const int*)a->seqused_k)[b] : a->seqlen_k) - begin;
""",
    "varlen": """
#define SEQUENCES a->offsets - 1
#define AT(name, head, row) (int64_t(row) * a->name##_stride_seq + (head) * a->name##_stride_head)
#define LSE(name, head, row) ((head) * a->name##_stride_head + (row))
#define SEQUENCE \\
  auto at_q = (const int32_t*)a->cu_seqlens_q, at_k = (const int32_t*)a->cu_seqlens_k; \\
  auto used = (const int32_t*)a->seqused_k; \\
  const int top = at_q[b], queries = at_q[b + 1] - top, begin = at_k[b]; \\
  [[maybe_unused]] const int held = at_k[b + 1] - begin; \\
  const int keys = used ? used[b] : held;
#define TOP top
""",
}
# what calls in e4m3 have beside their bytes
NUMBERS = {
    "numbers": """
  auto number = [](const void* x, int64_t place, float none) {
    return x ? ((const float*)x)[place] : none;
  };
#define HEAD(name, head) b * a->name##_stride_batch + (head) * a->name##_stride_head
#define COLUMN_OF(name, d) HEAD(name, g) + d * a->name##_stride_column
""",
    "mean": "for (int d = 0; d < %(d)d; d++)"
    "  mean += float(q[AT(q, h, top + i) + d]) * number(a->k_mean, COLUMN_OF(k_mean, d), 0);",
    "scaled": "s = (s * number(a->k_descale, HEAD(k_descale, g) + GROUP(j), 1) + mean) *"
    "    number(a->q_descale, HEAD(q_descale, h) + GROUP(i), 1);",
    "times": " * number(a->v_descale, HEAD(v_descale, g) +"
    "    (BY_COLUMN ? d * a->v_descale_stride_column : j / BLOCK), 1)",
    "plus": " + (1 - SINK / sum) * number(a->v_mean, COLUMN_OF(v_mean, d), 0)",
}
# whether query i of a sequence does not see key j, and what becomes of a product s
_AT, _ROW = "(i + keys - queries)", "(TOP + i)"
HIDDEN = {
    "full": "false",
    "causal": f"j > {_AT}",
    "window": f"(j < {_AT} - a->window_left || j > {_AT} + a->window_right)",
    "chunked": f"(j > {_AT} || j / a->chunk != {_AT} / a->chunk)",
    "prefix": f"(j > {_AT} && j >= ((const int*)a->prefix)[b])",
    "causal_by_sequence": f"(j > {_AT} && ((const int*)a->causal_of)[b])",
    "document": f"(j < ((const int*)a->first)[{_ROW}] || j >= ((const int*)a->last)[{_ROW}])",
}
SCORES = {
    "plain": "s * a->scale",
    "softcap": "a->softcap * std::tanh(s * a->scale / a->softcap)",
}
SLOPES = {"softcap": "(1 - std::pow(SCORE / a->softcap, 2.f))"}
ATTENTION = """
static int computed(const %(struct)s* a) {%(numbers)s
  [[maybe_unused]] static const int order[16] = {%(order)s};
  auto q = (const E*)a->q, k = (const E*)a->k, v = (const E*)a->v;
  for (int b = 0; b < SEQUENCES; b++) for (int h = 0; h < a->heads; h++) {
    SEQUENCE
    const int64_t g = h / (a->heads / a->kv_heads);
    for (int i = 0; i < queries; i++) {
      std::vector<float> o(%(dv)d);
      float sum = SINK;
      [[maybe_unused]] float mean = 0;
      %(mean)s
      for (int j = 0; j < keys; j++) {
        if (HIDDEN) continue;
        float s = 0;
        for (int d = 0; d < %(d)d; d++)
          s += float(q[AT(q, h, top + i) + d]) * float(k[AT(k, g, begin + j) + d]);
        %(scaled)s
        const float p = std::exp(SCORE);
        sum += p;
        for (int d = 0; d < %(dv)d; d++) {
          int64_t at = AT(v, g, begin + j) + d;
          for (int place = 0; COLUMNS && place < 16; place++)
            if (order[place] == j %% 16) at = AT(v, g, d) + j / 16 * 16 + place;
          o[d] += p * float(v[at])%(times)s;
        }
      }
      for (int d = 0; d < %(dv)d; d++)
        ((O*)a->out)[AT(out, h, top + i) + d] =
            O((sum ? o[d] / sum%(plus)s : 0) + (top + i == WRONG ? 0.5f : 0));
      if (a->lse)
        ((float*)a->lse)[LSE(lse, h, top + i)] =
            std::log(sum) + (top + i == WRONG_LAST ? 0.1f : 0);
    }
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
static int computed(const %(struct)s* a) {
  auto q = (const E*)a->q, k = (const E*)a->k, v = (const E*)a->v;
  auto dout = (const E*)a->dout, out = (const E*)a->out;
  auto dq = (O*)a->dq, dk = (O*)a->dk, dv = (O*)a->dv;
  auto dlse = (const float*)a->dlse;
  const int group = a->kv_heads ? a->heads / a->kv_heads : 0;
  std::vector<float> of_sinks(a->heads);
  for (int b = 0; b < SEQUENCES; b++) for (int g = 0; g < a->kv_heads; g++) {
    SEQUENCE
    std::vector<float> sum_k(held * %(d)d), sum_v(held * %(dv)d);
    for (int n = 0; n < group; n++) for (int i = 0; i < queries; i++) {
      const int h = INTERLEAVED ? n * a->kv_heads + g : g * group + n;  // of this KV head
      const E* qs = q + AT(q, h, top + i);
      const E* os = out + AT(out, h, top + i);
      const E* gs = dout + AT(dout, h, top + i);
      const float lse = ((const float*)a->lse)[LSE(lse, h, top + i)];
      std::vector<float> sum_q(%(d)d);
      float delta = dlse ? -dlse[LSE(dlse, h, top + i)] : 0;
      for (int d = 0; d < %(dv)d; d++) delta += float(gs[d]) * float(os[d]);
      if (lse > -INFINITY) of_sinks[h] -= SINK / std::exp(lse) * delta;
      for (int j = 0; j < keys; j++) {
        if (CAUSAL && j > i + keys - queries) continue;
        const E* ks = k + AT(k, g, begin + j);
        const E* vs = v + AT(v, g, begin + j);
        float s = 0, dp = 0;
        for (int d = 0; d < %(d)d; d++) s += float(qs[d]) * float(ks[d]);
        for (int d = 0; d < %(dv)d; d++) dp += float(gs[d]) * float(vs[d]);
        const float p = std::exp(SCORE - lse), ds = a->scale * p * (dp - delta) * SLOPE;
        for (int d = 0; d < %(dv)d; d++) sum_v[j * %(dv)d + d] += p * float(gs[d]);
        for (int d = 0; d < %(d)d; d++) sum_k[j * %(d)d + d] += ds * float(qs[d]);
        for (int d = 0; d < %(d)d; d++) sum_q[d] += ds * float(ks[d]);
      }
      O* to = dq + AT(dq, h, top + i);
      for (int d = 0; d < %(d)d; d++) to[d] = O(sum_q[d] + (top + i == WRONG ? 0.5f : 0));
    }
    for (int j = 0; j < held; j++) {
      const int key = begin + j;
      O* to = dk + AT(dk, g, key);
      for (int d = 0; d < %(d)d; d++) to[d] = O(sum_k[j * %(d)d + d] + (key == WRONG_MIDDLE));
      to = dv + AT(dv, g, key);
      for (int d = 0; d < %(dv)d; d++) to[d] = O(sum_v[j * %(dv)d + d] + (key == WRONG_LAST));
    }
  }
  DSINKS
  return 0;
}
"""
FUNCTIONS = """
extern "C" {
int64_t fagen_%(slug)s_workspace(const struct %(struct)s*);
int fagen_%(slug)s(const struct %(struct)s* a, void*) {
  if (!a) return DEMO_NULL_POINTER;
  if (a->struct_bytes != sizeof(*a) || a->version != %(guard)s) return DEMO_WRONG_STRUCT;
  if (%(works)d && a->workspace_bytes < fagen_%(slug)s_workspace(a)) return 8;
  for (int i = 0; %(zeroed)d && i < a->workspace_bytes; i++)
    if (((const char*)a->workspace)[i]) return 9;
#ifdef IGNORED
  auto other = *a;
  other.IGNORED = 0;
  a = &other;
#endif
  return computed(a);
}
int64_t fagen_%(slug)s_workspace(const struct %(struct)s* a) {
  return a ? %(needless)s ? 0 : 4 * (1 + a->heads) : -1;
}
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
    texts = {
        "slug": slug,
        "struct": plan.signature.struct,
        "guard": plan.signature.guard,
        "d": plan.head_dim,
        "dv": values.get("head_dim_v"),
        "zeroed": plan.launches.zeroed,
        "works": plan.launches.needs_workspace,
        "needless": f"a->{plan.launches.unless}_given" if plan.launches.unless else "false",
        "order": ", ".join(map(str, KEY_ORDER)),
        **dict.fromkeys(NUMBERS, ""),
    }
    if plan.kind == "forward" and "q_descale" in [x.name for x in plan.signature.tensors]:
        texts |= {name: text % texts for name, text in NUMBERS.items()}
    out = plan.signature.outputs[0]
    head = f"using E = {plan.dtype.cpp};\nusing O = {out.dtype.cpp};\n"
    head += "#ifndef WRONG\n#define WRONG -1\n#endif\n"
    head += "#ifndef WRONG_LAST\n#define WRONG_LAST -1\n#endif\n"
    head += "#ifndef WRONG_MIDDLE\n#define WRONG_MIDDLE -1\n#endif\n"
    head += "#ifndef INTERLEAVED\n#define INTERLEAVED 0\n#endif\n"
    head += f"constexpr bool CAUSAL = {str(values.get('mask') == 'causal').lower()};\n"
    sink = values.get("sink")
    if sink:
        head += f"using Sink = {plan.sink.cpp};\n"
    head += f"#define HIDDEN {HIDDEN.get(values.get('mask', ''), '')}\n"
    head += f"#define SCORE {SCORES.get(values.get('score', ''), '')}\n"
    head += f"#define SLOPE {SLOPES.get(values.get('score', ''), '1')}\n"
    of_sinks = "for (int h = 0; h < a->heads; h++) ((Sink*)a->dsinks)[h] = Sink(of_sinks[h]);"
    head += f"#define DSINKS {of_sinks if sink and plan.kind == 'backward' else ''}\n"
    head += f"#define SINK {'std::exp(float(((const Sink*)a->sinks)[h]))' if sink else '0'}\n"
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
    head += SEQUENCES["varlen" if plan.signature.form.startswith("varlen") else ""]
    head += SEQUENCES["decode"] if plan.kind == "decode" else ""
    body = bodies[plan.signature.leader.name]
    return "\n".join(lines) + "\n" + head + body % texts + FUNCTIONS % texts


@pytest.mark.parametrize(
    "slug",
    [
        "fwd_fp16_d128_causal_m128n128",
        "fwd_bf16_d64_full_m128n128",
        "fwd_e4m3_d64_full_m256n64_s3",
        "fwd_e4m3_d256_causal_m128n96_s3_half_nointer_sblock",
        "fwd_e4m3_d128_full_m128n128_vrows_sblock",
        "fwd_fp16_d64_causal_m64n64_varlen",
        "fwd_e4m3_d64_causal_m64n64_varlen",
        "comb_fp16_d64",
        "comb_fp32_d128_obf16_varlen",
        "quant_fp16_d128_rot_shead",
        "quant_fp16_d128_center_scol_vcols",
        "quant_fp16_d128_rot_center",
        "quant_bf16_d64_halves_shead",
        "quant_bf16_d64_pairs_rot",
        "bwd_fp16_d64_full_m128n128",
        "bwd_bf16_d64_causal_m128n128",
        "bwd_bf16_d64_causal_m128n128_varlen_underdp",
        "bwd_fp16_d64_causal_m64n64_softcap_sinkbf16",
        "dec_fp16_d64_causal_r8n128",
        "dec_bf16_d128v64_full_r16n64",
        "fwd_fp16_d64_window_m64n64_softcap_varlen",
        "fwd_bf16_d64_document_m64n64_packgqa",
        "fwd_fp16_d64_document_m64n64_varlen",
        "fwd_fp16_d64_chunked_m64n64_sinkbf16",
        "fwd_e4m3_d64_prefix_m64n64_sinkfp32_vrows",
        "dec_bf16_d64_prefix_r8n64",
        "dec_fp16_d64_causal_by_sequence_r8n64",
    ],
)
def test_the_program_tells_right_from_wrong(slug, tmp_path):
    if not CUDA.exists():
        pytest.skip("the CUDA headers are not there")
    files = source.texts(vendor.folder_of(vendor.asked("demo", [registry.from_slug(slug)])))
    for path, text in files.items():
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
