// A node of autograd's graph for every kernel of attention: it calls the forward kernel's op and, backwards, that of the
// gradients. Python would take the host longer than both.
//
// Unlike a kernel's binding it needs more of torch than its stable ABI: it is built once for each torch.

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Synchronized.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::IValue;
using torch::autograd::AutogradContext;
using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::jit::Stack;
using Op = c10::OperatorHandle;

constexpr int64_t kAligned = 16;  // bytes, of strides and of where a tensor begins

Op op(const std::string& name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), ""); }

// The op of a forward kernel, and those of its gradients: the one that refuses second derivatives too.
struct Kernels {
  Op forward, gradients, refusing;
  std::string slug;
};

auto& numbered() {
  static auto& all = *new c10::Synchronized<std::deque<Kernels>>;  // ops may be called until the process ends
  return all;
}

int64_t number(std::string forward, std::string gradients, std::string refusing, std::string slug) {
  const Kernels kernels{op(forward), op(gradients), op(refusing), slug};
  return numbered().withLock([&](auto& all) {
    all.push_back(kernels);
    return static_cast<int64_t>(all.size()) - 1;
  });
}

const Kernels& kernels_of(int64_t number) {
  return *numbered().withLock([&](auto& all) { return &all.at(number); });
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
void call(const Op& op, Stack& stack) {
  try {
    op.callBoxed(stack);
  } catch (const std::invalid_argument& refusal) {
    TORCH_CHECK_VALUE(false, refusal.what());
  }
}

// What the backward pass needs of a call beside tensors.
struct Call {
  int64_t kernels;  // their number
  double scale;
  bool deterministic, torchs;  // what the caller asked, and what torch wanted then
};

// dq, dk and dv where needed. Kept are q, k, v, of varlen sequences their offsets, out, lse, and of varlen sequences
// the lengths in use: in the order of the op of gradients.
template <class Needed>
variable_list backward(const Call& of, const variable_list& kept, const variable_list& gradients,
                       const Needed& needed) {
  const bool varlen = kept.size() > 5;
  const auto out = kept.begin() + (varlen ? 5 : 3);
  Stack stack;
  stack.reserve(kept.size() + 3);
  stack.emplace_back(gradients[0].defined() ? laid_out(gradients[0]) : at::zeros_like(*out));
  stack.insert(stack.end(), kept.begin(), out + 2);
  stack.emplace_back(of.scale);
  const bool has_dlse = gradients.size() > 1 && gradients[1].defined();
  stack.push_back(has_dlse ? IValue(gradients[1].contiguous()) : IValue());
  if (varlen) {
    stack.push_back(kept.back().defined() ? IValue(kept.back()) : IValue());
  }
  const Kernels* kernels = &kernels_of(of.kernels);
  if (at::globalContext().deterministicAlgorithms() != of.torchs) {  // maybe another kernel, which Python knows
    static const Op anew = op("fagen::kernels_anew");
    Stack asked{kernels->slug, of.deterministic, kept[0], kept[1]};
    call(anew, asked);
    kernels = &kernels_of(asked[0].toInt());
  }
  // with create_graph the one that refuses second derivatives
  call(at::GradMode::is_enabled() ? kernels->refusing : kernels->gradients, stack);
  variable_list results(3);
  for (size_t i = 0; i < 3; ++i) {
    if (needed(i)) {
      results[i] = std::move(stack[i]).toTensor();
    }
  }
  return results;
}

// As torch's compiled autograd has it called.
struct Attention : torch::autograd::Function<Attention> {
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto& data = context->saved_data;
    const Call call{data["kernels"].toInt(), data["scale"].toDouble(), data["deterministic"].toBool(),
                    data["torch's"].toBool()};
    const auto needed = [&](size_t i) { return context->needs_input_grad(i); };
    return ::backward(call, context->get_saved_variables(), gradients, needed);
  }
};

// What torch's own node of a Function keeps lies in more pieces of memory, which another thread frees.
struct AttentionBackward final : torch::autograd::CppNode<Attention> {
  Call call;

  std::string name() const override { return "AttentionBackward"; }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto needed = [&](size_t i) { return task_should_compute_output(i); };
    return ::backward(call, ctx_.get_saved_variables(), gradients, needed);
  }

  void compiled_args(torch::autograd::CompiledNodeArgs& arguments) const override {
    auto& data = const_cast<AttentionBackward*>(this)->ctx_.saved_data;
    data["kernels"] = call.kernels;
    data["scale"] = call.scale;
    data["deterministic"] = call.deterministic;
    data["torch's"] = call.torchs;
    CppNode::compiled_args(arguments);
  }
};

// A node as torch holds it: since 2.13 it counts its references itself.
template <class Pointer = decltype(torch::autograd::Edge::function)>
Pointer held(Node* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return Pointer(node, [](auto* last) { deleteNode(last); });
  } else {
    return Pointer::unsafe_steal_from_new(node);
  }
}

// Takes the number of kernels, whether gradients are to be deterministic, whether lse is wanted, and what the forward
// kernel takes; leaves out and lse. Boxed, as its op is called: so tensors are unpacked for the kernel alone.
void attention(const Op& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const auto given = stack->end() - count, tensors = given + 3;
  const bool varlen = count > 7, has_lse = given[2].toBool();
  const Kernels& kernels = kernels_of(given[0].toInt());
  auto* attention = new AttentionBackward;
  const auto node = held(attention);
  node->next_edges().reserve(3);
  for (size_t i = 0; i < 3; ++i) {
    node->add_next_edge(torch::autograd::impl::gradient_edge(tensors[i].toTensor()));
  }
  Stack called(kernels.forward.schema().arguments().size());  // what a call leaves out is None
  std::copy(tensors, stack->end(), called.begin());
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    kernels.forward.callBoxed(called);
  }
  Tensor out = std::move(called[0]).toTensor(), lse = std::move(called[1]).toTensor();
  create_gradient_edge(out, node);
  if (has_lse) {
    create_gradient_edge(lse, node);
  }
  variable_list kept;
  kept.reserve(8);
  auto one = tensors;
  for (; one->isTensor(); ++one) {
    kept.push_back(one->toTensor());
  }
  attention->call = {given[0].toInt(), one->toDouble(), given[1].toBool(),
                     at::globalContext().deterministicAlgorithms()};
  kept.insert(kept.end(), {out, lse});
  if (varlen) {
    kept.push_back(given[count - 1].toOptional<Tensor>().value_or(Tensor()));
  }
  attention->is_variable_input_ = {true, true, true};
  attention->ctx_.set_materialize_grads(false);
  attention->set_ctx_grad_fn(node);
  attention->ctx_.save_for_backward(std::move(kept));
  attention->save_variables_to_ctx();
  torch::jit::drop(*stack, count);
  stack->push_back(std::move(out));
  stack->push_back(has_lse ? IValue(std::move(lse)) : IValue());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fagen, m) {
  m.def("number_kernels(str forward, str gradients, str refusing, str slug) -> int", &number);
  m.def(
      "attention_with_grad(int kernels, bool deterministic, bool return_lse, Tensor q, Tensor k, Tensor v, "
      "float scale) -> (Tensor, Tensor?)",
      torch::CppFunction::makeFromBoxedFunction<&attention>());
  m.def(
      "attention_varlen_with_grad(int kernels, bool deterministic, bool return_lse, Tensor q, Tensor k, Tensor v, "
      "Tensor cu_seqlens_q, Tensor cu_seqlens_k, float scale, Tensor? seqused_k) -> (Tensor, Tensor?)",
      torch::CppFunction::makeFromBoxedFunction<&attention>());
}
