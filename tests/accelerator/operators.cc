// The operators: memory, views and copies here, and all others by the CPU's kernels, which see the
// accelerator's memory in place (so that strides, alignment and bits are the CPU's).
#include <cstring>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "tests/accelerator/internal.h"

namespace smartinf::test_accelerator {
namespace {

using at::IntArrayRef;
using at::Tensor;

bool on_device(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

bool known_to_streams(const Tensor& tensor) {
  return on_device(tensor) || is_pinned(tensor.storage().data());
}

size_t bytes_spanned(const Tensor& tensor) {
  return tensor.numel() == 0 ? 0
                             : at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                                tensor.itemsize());
}

Access access_to(const Tensor& tensor, bool writes) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data()) +
                     static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  return {begin, begin + bytes_spanned(tensor), writes};
}

// The same bytes as a tensor of the CPU. Owns nothing.
Tensor as_host(const Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  c10::DataPtr data(host_view(storage.data()), c10::Device(c10::DeviceType::CPU));
  Tensor host = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr,
                   /*resizable=*/false),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                    tensor.storage_offset());
  return host;
}

Tensor empty_memory_format(IntArrayRef size, std::optional<at::ScalarType> type,
                           std::optional<at::Layout> /*layout*/,
                           std::optional<at::Device> /*device*/, std::optional<bool> /*pinned*/,
                           std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> type,
                     std::optional<at::Layout> /*layout*/, std::optional<at::Device> /*device*/,
                     std::optional<bool> /*pinned*/) {
  return at::detail::empty_strided_generic(size, stride, &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

const Tensor& resize_(const Tensor& self, IntArrayRef size,
                      std::optional<at::MemoryFormat> /*format*/) {
  const size_t needed = at::detail::computeStorageNbytesContiguous(
      size, self.itemsize(), static_cast<size_t>(self.storage_offset()));
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef size,
                    IntArrayRef stride) {
  c10::TensorImpl* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    tensor->set_sizes_contiguous(size);
  } else {
    tensor->set_sizes_and_strides(size, stride);
  }
  const size_t needed = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.itemsize(), static_cast<size_t>(offset));
  TORCH_CHECK(needed <= self.storage().nbytes(), "test accelerator: set_ wants ", needed,
              " bytes of a storage of ", self.storage().nbytes());
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {});
}

// As CUDA does it: on the current stream, at once where both are of the device. Between host and
// device it runs late if it may, and is waited for otherwise.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const c10::StreamId stream = current_stream();
  std::vector<Access> accesses;
  if (known_to_streams(from)) accesses.push_back(access_to(from, /*writes=*/false));
  if (known_to_streams(to)) accesses.push_back(access_to(to, /*writes=*/true));
  note_accesses(stream, accesses, "copy_");
  const auto copy = [from_host = as_host(from), to_host = as_host(to)] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    Tensor(to_host).copy_(from_host);
  };
  if (on_device(from) && on_device(to)) {
    drain(stream);
    copy();
    return to;
  }
  const Tensor& host = on_device(to) ? from : to;
  const bool late = non_blocking && is_pinned(host.storage().data()) &&
                    host.is_non_overlapping_and_dense() && from.scalar_type() == to.scalar_type();
  if (late && on_device(from)) {  // whoever reads too early shall see it
    std::memset(host.data_ptr(), kPoison, bytes_spanned(host));
  }
  // As torch's allocator of pinned memory, keeps the host's side; the device's is the caller's
  // matter.
  enqueue_copy(stream, on_device(to), bytes_spanned(host),
               [copy, kept = c10::Storage(host.storage())] { copy(); });
  if (!late) host_waits_for(stream);
  return to;
}

void record_stream(Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// One call of an operator by the CPU's kernel.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(*stack) {}

  void run() {
    const auto& arguments = op_.schema().arguments();
    const size_t first = stack_.size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const c10::AliasInfo* alias = arguments[i].alias_info();
      stack_[first + i] = replaced(stack_[first + i], alias != nullptr && alias->isWrite());
    }
    const c10::StreamId stream = current_stream();
    note_accesses(stream, accesses_, op_.schema().name());
    drain(stream);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    for (const Pair& pair : pairs_) {
      if (!pair.resized || pair.host.numel() == 0) continue;
      copy_out(pair.host, pair.device.resize_(pair.host.sizes()));
    }
    const size_t returns = op_.schema().returns().size();
    for (size_t i = stack_.size() - returns; i < stack_.size(); ++i) {
      stack_[i] = returned(stack_[i]);
    }
  }

 private:
  struct Pair {
    Tensor device;
    Tensor host;
    bool resized;  // perhaps: an output without elements
  };

  Tensor replaced(const Tensor& tensor, bool writes) {
    if (!on_device(tensor)) return tensor;
    const bool resized = writes && tensor.numel() == 0;
    accesses_.push_back(access_to(tensor, writes));
    pairs_.push_back({tensor,
                      resized ? at::empty({0}, tensor.options().device(at::kCPU)) : as_host(tensor),
                      resized});
    return pairs_.back().host;
  }

  c10::IValue replaced(const c10::IValue& value, bool writes) {
    if (value.isTensor()) return replaced(value.toTensor(), writes);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(replaced(tensor, writes));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(replaced(*tensor, writes)) : tensor);
      }
      return list;
    }
    return value.isDevice() ? c10::IValue(at::Device(at::kCPU)) : value;
  }

  Tensor returned(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (const Pair& pair : pairs_) {
      if (pair.host.is_same(tensor)) return pair.device;
      TORCH_CHECK(!pair.host.is_alias_of(tensor), "test accelerator: ", op_.schema().name(),
                  " gives a view, for which it has no kernel");
    }
    const auto options = tensor.options().device(the_device());
    const Tensor made = tensor.is_non_overlapping_and_dense()
                            ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
                            : at::empty(tensor.sizes(), options);
    copy_out(tensor, made);
    return made;
  }

  c10::IValue returned(const c10::IValue& value) {
    if (value.isTensor()) return returned(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(returned(tensor));
      return list;
    }
    host_waits_for(current_stream());  // the host sees a value: it has waited for it
    return value;
  }

  void copy_out(const Tensor& host, const Tensor& device) {
    note_accesses(current_stream(), {access_to(device, /*writes=*/true)}, op_.schema().name());
    as_host(device).copy_(host);
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::vector<Pair> pairs_;
  std::vector<Access> accesses_;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  HostCall(op, stack).run();
}

// As the CPU chooses: torch would not take the CPU's fused attention for a device.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                 const std::optional<Tensor>& mask, double dropout, bool causal,
                 std::optional<double> scale, bool gqa) {
  const int64_t fused = static_cast<int64_t>(at::SDPBackend::flash_attention);
  if (at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout, causal, scale, gqa) ==
      fused) {
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout,
                                                                       causal, mask, scale));
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, mask, dropout,
                                                            causal, {}, scale, gqa));
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty_memory_format);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("_copy_from", &copy_from);
  library.impl("record_stream", &record_stream);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("view.dtype", &at::native::view_dtype);
  library.impl("unfold", &at::native::unfold);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("scaled_dot_product_attention", &attention);
  // Torch has for devices what gives other bits.
  for (const char* name : {"silu_backward", "native_layer_norm", "native_layer_norm_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("scaled_dot_product_attention", &attention);
}

}  // namespace smartinf::test_accelerator
