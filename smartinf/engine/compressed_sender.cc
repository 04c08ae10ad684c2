#include "smartinf/engine/compressed_sender.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace smartinf::engine {

CompressedSender::CompressedSender(GradientCompressor& compressor, uint32_t threads)
    : compressor_(compressor) {
  workers_.resize(threads > 0 ? std::min(threads, kThreadsMax) : default_threads());
}

uint32_t CompressedSender::default_threads() {
  return std::clamp(std::thread::hardware_concurrency(), 1u, kThreadsMax);
}

CompressedSender::Failure CompressedSender::send(std::span<const Piece> pieces) {
  next_ = 0;
  failed_ = false;
  failure_ = Failure{};
  const size_t count = std::min(workers_.size(), pieces.size());
  std::vector<std::jthread> threads;
  for (size_t i = 0; i < count; ++i) {
    if (workers_[i] == nullptr) workers_[i] = std::make_unique<Worker>();
    // The last one is this thread's.
    if (i + 1 < count) {
      threads.emplace_back([&, i] { work(*workers_[i], pieces); });
    } else {
      work(*workers_[i], pieces);
    }
  }
  threads.clear();
  return std::move(failure_);
}

void CompressedSender::work(Worker& worker, std::span<const Piece> pieces) {
  for (size_t turn = 0;; ++turn) {
    Outgoing& outgoing = worker.outgoing[turn % worker.outgoing.size()];
    wait_for(worker, outgoing);
    const size_t next = next_++;
    if (failed_ || next >= pieces.size()) break;
    const Piece& piece = pieces[next];
    const auto message =
        compressor_.compress(worker.scratch, outgoing.writer, *piece.subgroup, piece.sits_out);
    csd::Command& command = outgoing.command;
    command = csd::Command{};
    command.kind = csd::CommandKind::kPutGradient;
    command.replies = &worker.replies;
    command.owner = piece.device;
    command.subgroup = piece.subgroup->id;
    command.gradient = message.data();
    command.message_bytes = message.size();
    outgoing.in_flight = true;
    const std::lock_guard lock(mutex_);
    piece.device->submit(command);
  }
  for (const Outgoing& outgoing : worker.outgoing) wait_for(worker, outgoing);
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
    failure_.subgroup = completion.command->subgroup;
  }
}

}  // namespace smartinf::engine
