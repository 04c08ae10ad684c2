#include "smartinf/engine/compressed_sender.h"

#include <utility>

namespace smartinf::engine {

CompressedSender::CompressedSender(compress::GradientCompressor& compressor, base::ThreadTeam& team,
                                   DeviceWatch& watch)
    : compressor_(compressor), team_(team), watch_(watch), workers_(team.size()) {}

CompressedSender::Failure CompressedSender::send(std::span<const Piece> pieces) {
  failed_ = false;
  failure_ = Failure{};
  team_.run(pieces.size(), [&](uint32_t worker, size_t index) {
    if (failed_) return;
    if (workers_[worker] == nullptr) workers_[worker] = std::make_unique<Worker>(watch_);
    send_one(*workers_[worker], pieces[index]);
  });
  for (const auto& worker : workers_) {
    if (worker == nullptr) continue;
    for (const Outgoing& outgoing : worker->outgoing) wait_for(*worker, outgoing);
  }
  return std::move(failure_);
}

void CompressedSender::send_one(Worker& worker, const Piece& piece) {
  Outgoing& outgoing = worker.outgoing[worker.turn++ % worker.outgoing.size()];
  wait_for(worker, outgoing);
  const auto message =
      compressor_.compress(worker.scratch, outgoing.writer, *piece.subgroup, piece.skipped);
  outgoing.in_flight =
      worker.replies.submit(*piece.device, csd::PutCompressedGradient{piece.subgroup->id, message});
}

void CompressedSender::wait_for(Worker& worker, const Outgoing& outgoing) {
  while (outgoing.in_flight != nullptr) {
    csd::Completion completion = worker.replies.next();
    for (Outgoing& own : worker.outgoing) {
      if (own.in_flight == completion.command) own.in_flight = nullptr;
    }
    if (completion.status.ok()) continue;
    const std::lock_guard lock(mutex_);
    if (failed_.exchange(true)) continue;
    failure_.status = std::move(completion.status);
    failure_.device = static_cast<const csd::Device*>(completion.command->owner);
    failure_.subgroup = completion.command->as<csd::PutCompressedGradient>()->subgroup;
  }
}

}  // namespace smartinf::engine
