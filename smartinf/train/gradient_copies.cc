#include "smartinf/train/gradient_copies.h"

#include <utility>

#include <c10/core/StreamGuard.h>

#include "smartinf/base/check.h"

namespace smartinf::train {

GradientCopies::GradientCopies(const CopyStreams& streams, torch::ScalarType type,
                               uint64_t elements)
    : streams_(streams),
      ring_N_(
          torch::empty({static_cast<int64_t>(elements)}, torch::dtype(type).pinned_memory(true))) {}

GradientCopies::~GradientCopies() {
  for (Copy& copy : under_way_) copy.copied.synchronize();
}

/// Behind the newest one, or at the beginning again.
std::optional<uint64_t> GradientCopies::place_for(uint64_t elements) const {
  const auto all = static_cast<uint64_t>(ring_N_.numel());
  const uint64_t begin = under_way_.empty() ? 0 : under_way_.front().at;
  const uint64_t end = under_way_.empty() ? 0 : end_;
  if (!under_way_.empty() && end <= begin) {
    return elements <= begin - end ? std::optional(end) : std::nullopt;
  }
  if (elements <= all - end) return end;
  return elements <= begin ? std::optional(uint64_t{0}) : std::nullopt;
}

void GradientCopies::start(uint64_t first, const torch::Tensor& gradient) {
  const auto count = static_cast<uint64_t>(gradient.numel());
  const std::optional<uint64_t> place = place_for(count);
  SI_CHECK(place.has_value(), "a gradient is copied for which there is no room");
  const torch::Tensor to =
      ring_N_.narrow(0, static_cast<int64_t>(*place), static_cast<int64_t>(count));
  const c10::Event made = streams_.done_so_far();
  const c10::StreamGuard guard(streams_.down());
  made.block(streams_.down());
  to.copy_(gradient.flatten(), /*non_blocking=*/true);
  gradient.record_stream(streams_.down());  // the caller may let go of it
  under_way_.push_back({{first, count, to.const_data_ptr()}, *place, streams_.event()});
  under_way_.back().copied.record(streams_.down());
  end_ = *place + count;
}

GradientCopies::Copied GradientCopies::next() {
  SI_CHECK(!empty(), "no gradient is copied");
  Copy oldest = std::move(under_way_.front());
  under_way_.pop_front();
  oldest.copied.synchronize();
  return oldest.copied_to;
}

}  // namespace smartinf::train
