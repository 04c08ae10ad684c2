#include "smartinf/train/linear.h"

#include <algorithm>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/torch.h>

#include "smartinf/train/product_rate.h"

namespace smartinf::train {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

/// A block of f32 is 4 MiB.
constexpr int64_t kBlock = 1024;

/// a_RS times b_SC, in the type of a.
Tensor product_in_f32(const Tensor& a_RS, const Tensor& b_SC,
                      const std::optional<Tensor>& bias_C = {}) {
  const int64_t rows = a_RS.size(0);
  const int64_t columns = b_SC.size(1);
  const int64_t terms = a_RS.size(1);
  Tensor y_RC = torch::empty({rows, columns}, a_RS.options());
  for (int64_t c = 0; c < columns; c += kBlock) {
    const int64_t width = std::min(kBlock, columns - c);
    for (int64_t r = 0; r < rows; r += kBlock) {
      const int64_t height = std::min(kBlock, rows - r);
      Tensor sum = torch::zeros({height, width}, a_RS.options().dtype(torch::kFloat32));
      if (bias_C.has_value()) sum.add_(bias_C->narrow(0, c, width));
      for (int64_t s = 0; s < terms; s += kBlock) {
        const int64_t depth = std::min(kBlock, terms - s);
        sum.addmm_(a_RS.narrow(0, r, height).narrow(1, s, depth).to(torch::kFloat32),
                   b_SC.narrow(0, s, depth).narrow(1, c, width).to(torch::kFloat32));
      }
      y_RC.narrow(0, r, height).narrow(1, c, width).copy_(sum);
    }
  }
  return y_RC;
}

struct LinearInF32 : torch::autograd::Function<LinearInF32> {
  static Tensor forward(AutogradContext* context, const Tensor& x_MK, const Tensor& weight_NK,
                        const std::optional<Tensor>& bias_N) {
    // As torch::linear, which saves nothing for a gradient that nobody wants.
    context->save_for_backward(
        {weight_NK.requires_grad() ? x_MK : Tensor(), x_MK.requires_grad() ? weight_NK : Tensor()});
    context->saved_data["bias"] = bias_N.has_value() && bias_N->requires_grad();
    return product_in_f32(x_MK, weight_NK.t(), bias_N);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Tensor& gradient_MN = gradients.front();
    const variable_list saved = context->get_saved_variables();
    variable_list made(3);
    if (saved[1].defined()) made[0] = product_in_f32(gradient_MN, saved[1]);
    if (saved[0].defined()) made[1] = product_in_f32(gradient_MN.t(), saved[0]);
    if (context->saved_data["bias"].toBool()) made[2] = gradient_MN.sum(0);
    return made;
  }
};

bool processor_multiplies_bf16() {
#if defined(__x86_64__)
  constexpr unsigned kFeatures = 7;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  const bool amx = __get_cpuid_count(kFeatures, 0, &a, &b, &c, &d) != 0 && (d >> 22 & 1) != 0;
  const bool avx512 = __get_cpuid_count(kFeatures, 1, &a, &b, &c, &d) != 0 && (a >> 5 & 1) != 0;
  return amx || avx512;
#else
  return true;  // as far as torch says so
#endif
}

}  // namespace

bool has_fast_bf16() {
  static const bool has = [] {
    const auto asked =
        c10::Dispatcher::singleton().findSchema({"mkldnn::_is_mkldnn_bf16_supported", ""});
    return asked.has_value() && asked->typed<bool()>().call() && processor_multiplies_bf16();
  }();
  return has;
}

Tensor linear_in_f32(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const Tensor x_MK = x.reshape({-1, x.size(-1)});
  const Tensor y_MN = LinearInF32::apply(x_MK, weight, bias);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  return y_MN.view(sizes);
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  if (!x.is_cpu() || x.scalar_type() != torch::kBFloat16 || has_fast_bf16()) {
    return torch::linear(x, weight, bias);
  }
  // For one token the time is that of reading the weights, which torch does once, and as they are.
  const bool one_row = x.numel() == x.size(-1) && !torch::GradMode::is_enabled();
  if (one_row && weight.is_contiguous()) return torch::linear(x, weight, bias);
  return linear_in_f32(x, weight, bias);
}

}  // namespace smartinf::train
