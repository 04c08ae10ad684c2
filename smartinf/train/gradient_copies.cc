#include "smartinf/train/gradient_copies.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "smartinf/base/check.h"

namespace smartinf::train {

namespace {

torch::Tensor pinned(torch::ScalarType type, uint64_t elements) {
  return torch::empty({static_cast<int64_t>(elements)}, torch::dtype(type).pinned_memory(true));
}

}  // namespace

GradientCopies::GradientCopies(torch::Device accelerator, torch::ScalarType type, uint64_t elements)
    : accelerator_(accelerator),
      copies_(c10::impl::VirtualGuardImpl(accelerator.type()).getStreamFromGlobalPool(accelerator)),
      buffers_{Buffer{pinned(type, elements), c10::Event(accelerator.type())},
               Buffer{pinned(type, elements), c10::Event(accelerator.type())}} {}

GradientCopies::~GradientCopies() {
  for (Buffer& buffer : buffers_) buffer.copied.synchronize();
}

void GradientCopies::start(uint64_t first, const torch::Tensor& gradient) {
  SI_CHECK(!full(), "more gradients are copied than there are buffers");
  Buffer& buffer = buffers_[started_++ % buffers_.size()];
  const torch::Tensor to = buffer.values_N.narrow(0, 0, gradient.numel());
  c10::Event made(accelerator_.type());
  made.record(c10::impl::VirtualGuardImpl(accelerator_.type()).getStream(accelerator_));
  const c10::StreamGuard guard(copies_);
  made.block(copies_);
  to.copy_(gradient.flatten(), /*non_blocking=*/true);
  gradient.record_stream(copies_);  // the caller may let go of it
  buffer.copied.record(copies_);
  under_way_.push_back({first, static_cast<uint64_t>(gradient.numel()), to.const_data_ptr()});
}

GradientCopies::Copied GradientCopies::next() {
  SI_CHECK(!empty(), "no gradient is copied");
  const Copied oldest = under_way_.front();
  buffers_[(started_ - under_way_.size()) % buffers_.size()].copied.synchronize();
  under_way_.pop_front();
  return oldest;
}

}  // namespace smartinf::train
