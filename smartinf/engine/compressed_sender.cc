#include "smartinf/engine/compressed_sender.h"

#include <chrono>
#include <utility>

namespace smartinf::engine {

CompressedSender::CompressedSender(GradientCompressor& compressor, base::ThreadTeam& team)
    : compressor_(compressor), team_(team), workers_(team.size()) {}

CompressedSender::Failure CompressedSender::send(std::span<const Piece> pieces) {
  failed_ = false;
  failure_ = Failure{};
  team_.run(pieces.size(), [&](uint32_t worker, size_t index) {
    if (failed_) return;
    if (workers_[worker] == nullptr) workers_[worker] = std::make_unique<Worker>();
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
      compressor_.compress(worker.scratch, outgoing.writer, *piece.subgroup, piece.sits_out);
  outgoing.command = {csd::PutCompressedGradient{piece.subgroup->id, message}, &worker.replies,
                      piece.device};
  outgoing.in_flight = true;
  piece.device->submit(outgoing.command);
}

void CompressedSender::wait_for(Worker& worker, const Outgoing& outgoing) {
  while (outgoing.in_flight) {
    csd::Completion completion;
    if (!worker.replies.pop(completion, std::chrono::hours(1))) continue;
    for (Outgoing& own : worker.outgoing) {
      if (&own.command == completion.command) own.in_flight = false;
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
