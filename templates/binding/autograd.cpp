// A node of autograd's graph for every kernel of attention: it calls the forward kernel's op and, backwards, that of the
// gradients. Python would take the host longer than both.
//
// Unlike a kernel's binding it needs more of torch than its stable ABI: it is built once for each torch.

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<Tensor>;
using Op = c10::OperatorHandle;

constexpr int64_t kAligned = 16;  // bytes, of strides and of where a tensor begins

Op op(const std::string& name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), ""); }

// The op of a forward kernel, and those of its gradients: the one that refuses second derivatives too.
struct Kernels {
  Op forward, gradients, refusing;
  std::string slug;
};

std::vector<std::unique_ptr<const Kernels>>& numbered() {
  static auto& all = *new std::vector<std::unique_ptr<const Kernels>>;  // ops may be called until the process ends
  return all;
}

std::mutex& numbering() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

int64_t number(std::string forward, std::string gradients, std::string refusing, std::string slug) {
  auto kernels = std::make_unique<const Kernels>(Kernels{op(forward), op(gradients), op(refusing), slug});
  const std::lock_guard<std::mutex> lock(numbering());
  numbered().push_back(std::move(kernels));
  return static_cast<int64_t>(numbered().size()) - 1;
}

const Kernels* kernels_of(int64_t number) {
  const std::lock_guard<std::mutex> lock(numbering());
  return numbered().at(number).get();
}

// dout as kernels take it: its last dimension contiguous, all else in whole pieces of TMA.
Tensor laid_out(const Tensor& dout) {
  const int64_t step = kAligned / dout.element_size(), last = dout.dim() - 1;
  bool fits = dout.stride(last) == 1 && dout.storage_offset() % step == 0;
  for (int64_t i = 0; i < last; ++i) {
    fits &= dout.stride(i) % step == 0;
  }
  return fits ? dout : dout.clone(at::MemoryFormat::Contiguous);
}

// Who is called from another thread by autograd's engine raises a ValueError by c10's alone.
void call(const Op& op, torch::jit::Stack& stack) {
  try {
    op.callBoxed(stack);
  } catch (const std::invalid_argument& refusal) {
    TORCH_CHECK_VALUE(false, refusal.what());
  }
}

struct Attention : torch::autograd::Function<Attention> {
  static variable_list forward(AutogradContext* ctx, const Kernels* kernels, bool deterministic, const Tensor& q,
                               const Tensor& k, const Tensor& v, double scale, const MaybeTensor& cu_seqlens_q,
                               const MaybeTensor& cu_seqlens_k, const MaybeTensor& seqused_k) {
    torch::jit::Stack stack{q, k, v};
    if (cu_seqlens_q) {
      stack.insert(stack.end(), {cu_seqlens_q, cu_seqlens_k, scale, seqused_k});
    } else {
      stack.emplace_back(scale);
    }
    stack.resize(kernels->forward.schema().arguments().size());  // what a call leaves out is None
    kernels->forward.callBoxed(stack);
    const Tensor out = stack[0].toTensor(), lse = stack[1].toTensor();
    variable_list saved{q, k, v, out, lse};
    if (cu_seqlens_q) {
      saved.insert(saved.end(), {*cu_seqlens_q, *cu_seqlens_k, seqused_k.value_or(Tensor())});
    }
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    ctx->saved_data["kernels"] = reinterpret_cast<int64_t>(kernels);
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["deterministic"] = deterministic;
    ctx->saved_data["torch's"] = at::globalContext().deterministicAlgorithms();
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto* kernels = reinterpret_cast<const Kernels*>(ctx->saved_data["kernels"].toInt());
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &out = saved[3], &lse = saved[4];
    const bool varlen = saved.size() > 5;
    const Tensor dout = gradients[0].defined() ? laid_out(gradients[0]) : at::zeros_like(out);
    const MaybeTensor dlse = gradients[1].defined() ? MaybeTensor(gradients[1].contiguous()) : std::nullopt;
    const MaybeTensor seqused_k = varlen && saved[7].defined() ? MaybeTensor(saved[7]) : std::nullopt;
    const auto &scale = ctx->saved_data["scale"], &deterministic = ctx->saved_data["deterministic"];
    torch::jit::Stack stack;
    const bool changed = at::globalContext().deterministicAlgorithms() != ctx->saved_data["torch's"].toBool();
    if (changed && !at::GradMode::is_enabled()) {  // another kernel, which Python knows
      static const Op anew = op("fagen::gradients_of");
      stack = {kernels->slug, deterministic, dout, q, k, v, out, lse, scale, dlse};
      for (size_t i = 5; i < 7; ++i) {
        stack.emplace_back(varlen ? MaybeTensor(saved[i]) : std::nullopt);
      }
      stack.emplace_back(seqused_k);
      call(anew, stack);
    } else {
      stack = {dout, q, k, v};
      if (varlen) {
        stack.insert(stack.end(), {saved[5], saved[6]});
      }
      stack.insert(stack.end(), {out, lse, scale, dlse});
      if (varlen) {
        stack.emplace_back(seqused_k);
      }
      // with create_graph the one that refuses second derivatives
      call(at::GradMode::is_enabled() ? kernels->refusing : kernels->gradients, stack);
    }
    variable_list found(9);  // of forward's arguments, of which all but q, k and v have none
    for (size_t i = 0; i < 3; ++i) {
      if (ctx->needs_input_grad(i)) {
        found[2 + i] = stack[i].toTensor();
      }
    }
    return found;
  }
};

std::tuple<Tensor, Tensor> attention(int64_t number, bool deterministic, const Tensor& q, const Tensor& k,
                                     const Tensor& v, double scale, const MaybeTensor& cu_seqlens_q,
                                     const MaybeTensor& cu_seqlens_k, const MaybeTensor& seqused_k) {
  const auto both = Attention::apply(kernels_of(number), deterministic, q, k, v, scale, cu_seqlens_q, cu_seqlens_k,
                                     seqused_k);
  return {both[0], both[1]};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fagen, m) {
  m.def("number_kernels(str forward, str gradients, str refusing, str slug) -> int", &number);
  m.def(
      "attention_with_grad(int kernels, bool deterministic, Tensor q, Tensor k, Tensor v, float scale, "
      "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_k=None) -> (Tensor, Tensor)",
      &attention);
}
