// DeviceUpdater: gradients that go down compressed, and the residual that waits for later steps.
#include <algorithm>

#include <fmt/format.h>

#include "smartinf/base/log.h"
#include "smartinf/engine/device_updater.h"
#include "smartinf/kernels/update.h"

namespace smartinf::engine {

using base::Status;

const base::Bf16* DeviceUpdater::residual() const {
  return compressor_ != nullptr ? compressor_->residual() : nullptr;
}

std::vector<kernels::StepAhead> DeviceUpdater::step_ahead() const {
  const std::lock_guard lock(mutex_);
  return weights_ahead_ == nullptr ? std::vector<kernels::StepAhead>() : ahead_;
}

std::string DeviceUpdater::stored_client_metadata() const {
  StepMetadata kept;
  kept.client_metadata = commit_client_metadata_;
  if (set_.residual) {
    kept.residual_step = keeping_ ? std::optional(protocol_.step()) : residual_step_;
    if (weights_ahead_ != nullptr) kept.ahead = next_ahead_;
  }
  return join_metadata(kept);
}

Status DeviceUpdater::recall_residual() {
  if (compressor_ == nullptr || !compressor_->feedback() || set_.fresh || set_.step == 0) {
    return Status();
  }
  if (!set_.residual || residual_step_ != set_.step) {
    base::log(
        base::LogLevel::kWarning,
        fmt::format("what compression kept at step {} is not on the devices; going on without "
                    "it (compress.residual_every = 1 writes it in every step)",
                    set_.step));
    return Status();
  }
  const size_t plane = kernels::rule_planes(options_.rule.rule).size();
  return read_planes(1u << plane, plane + 1,
                     [&](uint64_t first, std::span<const std::span<const float>> planes) {
                       compressor_->set_residual(first, planes.back());
                       return Status();
                     });
}

csd::WriteState DeviceUpdater::next_residual(size_t device, size_t subgroup) const {
  const storage::StoreLayout& layout = set_.devices[device]->layout();
  const storage::StoredSubgroup& stored = layout.subgroups[subgroup];
  csd::WriteState write{stored.id, stored.count, {}, 1u << (layout.planes.size() - 1)};
  write.residual = compressor_->next_residual(stored.first_element);
  return write;
}

void DeviceUpdater::keep_next_of(size_t device) {
  step_replies_.submit(*set_.devices[device], next_residual(device, next_to_keep_[device]++));
}

Status DeviceUpdater::send_compressed(const UpdateOptions& options) {
  SI_ASSIGN_OR_RETURN(const GradientSummary gradient,
                      gradient_tracker_.finish(options.gradient_scale));
  std::vector<plan::GroupSpan> skipped = space_.spans(0, space_.count());
  std::erase_if(skipped,
                [&](const plan::GroupSpan& span) { return !options.groups[span.group].skip; });
  compressor_->begin_update(number_of(options), options.gradient_scale, gradient.norm, skipped,
                            team_);
  std::vector<CompressedSender::Piece> pieces;
  for (const plan::Subgroup& subgroup : set_.subgroups) {
    if (is_skipped(subgroup, options)) {
      compressor_->leave(subgroup);
      continue;
    }
    CompressedSender::Piece& piece = pieces.emplace_back();
    piece.subgroup = &subgroup;
    piece.device = &device_of(subgroup.id);
    piece.skipped = space_.spans(subgroup.first, subgroup.count);
    std::erase_if(piece.skipped,
                  [&](const plan::GroupSpan& span) { return !options.groups[span.group].skip; });
  }
  return compressed_sender_->send(pieces).status;
}

void DeviceUpdater::keep_residual() {
  const std::lock_guard lock(mutex_);
  keep_wanted_ = true;
}

compress::CompressionSummary DeviceUpdater::compression() const {
  const std::lock_guard lock(mutex_);
  return compression_;
}

}  // namespace smartinf::engine
