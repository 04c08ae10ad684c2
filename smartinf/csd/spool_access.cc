#include "smartinf/csd/spool_access.h"

#include <algorithm>
#include <string>
#include <utility>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/checksum.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/units.h"

namespace smartinf::csd {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using Op = storage::SubgroupIo::Op;

constexpr uint64_t kBlockBytes = 256 * base::kKiB;  // of one checksum

/// Its place is part of it: bytes of another one are not taken for these.
uint64_t block_checksum(std::span<const std::byte> bytes, uint64_t offset_bytes) {
  return base::checksum(bytes, base::mix_seed(offset_bytes, bytes.size()));
}

template <typename Visit>
void for_each_block(std::span<const std::byte> bytes, const Visit& visit) {
  for (uint64_t at = 0; at < bytes.size(); at += kBlockBytes) {
    visit(at, bytes.subspan(at, std::min<uint64_t>(kBlockBytes, bytes.size() - at)));
  }
}

bool is_put(const storage::SubgroupIo& io) { return io.op == Op::kWriteSpool; }

}  // namespace

/// Forgets what lay there.
Result<SpoolAccess::Span*> SpoolAccess::span_to_put(uint64_t offset_bytes, uint64_t bytes) {
  auto first = spans_.lower_bound(offset_bytes);
  if (first != spans_.begin()) {
    const auto before = std::prev(first);
    if (before->first + before->second.bytes > offset_bytes) first = before;
  }
  auto last = first;
  for (; last != spans_.end() && last->first < offset_bytes + bytes; ++last) {
    if (last->second.users == 0) continue;
    return Status(ErrorCode::kFailedPrecondition,
                  "the spool's bytes at offset " + std::to_string(last->first) +
                      " are still being moved, and would be overwritten");
  }
  spans_.erase(first, last);
  Span& span = spans_[offset_bytes];
  span.bytes = bytes;
  return &span;
}

Result<SpoolAccess::Span*> SpoolAccess::span_to_get(uint64_t offset_bytes, uint64_t bytes) {
  const auto found = spans_.find(offset_bytes);
  if (found == spans_.end() || found->second.bytes != bytes || !found->second.written) {
    return Status(ErrorCode::kFailedPrecondition, "the spool holds no " + std::to_string(bytes) +
                                                      " bytes at offset " +
                                                      std::to_string(offset_bytes));
  }
  return &found->second;
}

void SpoolAccess::serve(Command& command, Status refusal) {
  const auto* put = command.as<PutSpool>();
  const auto* get = command.as<GetSpool>();
  const uint64_t offset = put != nullptr ? put->offset_bytes : get->offset_bytes;
  // The store only reads what it writes.
  const std::span<std::byte> bytes =
      put != nullptr ? std::span(const_cast<std::byte*>(put->bytes.data()), put->bytes.size())
                     : get->out;
  const uint64_t room = parts_.store->spool_bytes();
  if (refusal.ok()) refusal = check_spool(offset, bytes, room);
  if (!refusal.ok()) return parts_.complete(command, std::move(refusal));
  const Result<Span*> span =
      put != nullptr ? span_to_put(offset, bytes.size()) : span_to_get(offset, bytes.size());
  if (!span.ok()) return parts_.complete(command, span.status());

  Access& access = accesses_.emplace_back();
  access.command = &command;
  access.span = *span;
  access.begin_ns = base::now_ns();
  access.io.op = put != nullptr ? Op::kWriteSpool : Op::kReadSpool;
  access.io.spool_offset_bytes = offset;
  access.io.buffer = bytes;
  access.io.owner = &access;
  ++access.span->users;
  ++moving_;
  if (put != nullptr) pass_host_link(access, LinkDirection::kDown);
  parts_.store->start(access.io);
  if (put == nullptr || !parts_.options.store.checksums) return;
  for_each_block(bytes, [&](uint64_t at, std::span<const std::byte> block) {
    access.span->checksums.push_back(block_checksum(block, offset + at));
  });
}

void SpoolAccess::pass_host_link(Access& access, LinkDirection direction) {
  // At the store it has been counted there, and the store's links hold it back.
  if (parts_.options.host_link_place == HostLinkPlace::kAtStore) return;
  constexpr auto kKind = base::TrafficKind::kActivation;
  const uint64_t bytes = access.io.buffer.size();
  if (direction == LinkDirection::kUp) {
    parts_.host_traffic.add_up(kKind, bytes);
  } else {
    parts_.host_traffic.add_down(kKind, bytes);
  }
  if (Link* link = parts_.options.links.host.get(); link != nullptr) {
    access.due_ns = link->book(direction, kKind, bytes);
  }
}

Status SpoolAccess::verify(const Access& access) const {
  const uint64_t offset = access.io.spool_offset_bytes;
  Status status;
  if (access.span->checksums.empty()) return status;
  for_each_block(access.io.buffer, [&](uint64_t at, std::span<const std::byte> block) {
    const bool right =
        block_checksum(block, offset + at) == access.span->checksums[at / kBlockBytes];
    if (right || !status.ok()) return;
    status = Status(ErrorCode::kCorrupt, "what came back from the spool is not what went there",
                    "It was damaged on the drive or on its way. The state is not touched by it: "
                    "the step can be repeated. Look at the drive's health (smartctl -a).",
                    base::ErrorPlace{parts_.store->path(), offset + at, block.size(), 0});
  });
  return status;
}

bool SpoolAccess::took(storage::SubgroupIo& io) {
  if (!storage::is_spool(io)) return false;
  Access& access = *static_cast<Access*>(io.owner);
  --moving_;
  access.moved = true;
  const bool put = is_put(io);
  const uint64_t now = base::now_ns();
  if (parts_.options.trace != nullptr) {
    parts_.options.trace->record({put ? "write activations" : "read activations",
                                  put ? parts_.write_track : parts_.read_track,
                                  io.spool_offset_bytes / kBlockBytes, access.begin_ns, now,
                                  io.buffer.size(), base::TrafficKind::kActivation});
  }
  if (io.status.ok() && !put) io.status = verify(access);
  if (!io.status.ok()) {
    answer(access, io.status);
    return true;
  }
  if (!put) pass_host_link(access, LinkDirection::kUp);
  answer_if_passed(access, now);
  return true;
}

void SpoolAccess::answer_if_passed(Access& access, uint64_t now_ns) {
  if (access.moved && access.due_ns <= now_ns) answer(access, Status());
}

void SpoolAccess::answer(Access& access, Status status) {
  Span& span = *access.span;
  --span.users;
  if (is_put(access.io)) {
    span.written = status.ok();
  }
  Command& command = *access.command;
  accesses_.remove_if([&](const Access& some) { return &some == &access; });
  parts_.complete(command, std::move(status));
}

void SpoolAccess::on_time(uint64_t now_ns) {
  for (auto access = accesses_.begin(); access != accesses_.end();) {
    answer_if_passed(*access++, now_ns);
  }
}

uint64_t SpoolAccess::next_due_ns() const {
  uint64_t due = ~uint64_t{0};
  for (const Access& access : accesses_) {
    if (access.moved) due = std::min(due, access.due_ns);
  }
  return due;
}

void SpoolAccess::abandon(const Status& status) {
  moving_ = 0;
  for (const Access& access : accesses_) parts_.complete(*access.command, status);
  lost_.splice(lost_.end(), accesses_);
}

}  // namespace smartinf::csd
