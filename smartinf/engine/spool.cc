#include "smartinf/engine/spool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/leak_in_flight.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

Status check_memory(std::span<const std::byte> memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  if (!memory.empty() && (address | memory.size()) % base::kIoAlignment == 0) return Status();
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("memory to be spooled starts at a multiple of {0} bytes, and its size "
                            "is one",
                            base::kIoAlignment),
                "Allocate it with base::AlignedBuffer.");
}

}  // namespace

Spool::Spool(std::span<const std::unique_ptr<csd::Device>> devices, DeviceWatch& watch)
    : replies_(watch) {
  for (const auto& device : devices) {
    const uint64_t bytes = device->info().spool_bytes;
    if (bytes == 0 || device->info().of_other_rank) continue;
    areas_.push_back({device.get(), bytes, bytes, {{0, bytes}}});
    size_bytes_ += bytes;
  }
}

Result<Spool::Span> Spool::allocate(uint64_t bytes) {
  std::vector<size_t> order(areas_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto emptiness = [&](size_t area) {
    return static_cast<double>(areas_[area].free_bytes) /
           static_cast<double>(areas_[area].size_bytes);
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return emptiness(a) > emptiness(b); });
  for (const size_t index : order) {
    Area& area = areas_[index];
    const auto hole = std::find_if(area.holes.begin(), area.holes.end(),
                                   [&](const auto& some) { return some.second >= bytes; });
    if (hole == area.holes.end()) continue;
    Span span;
    span.area = index;
    span.offset_bytes = hole->first;
    if (hole->second > bytes) area.holes[hole->first + bytes] = hole->second - bytes;
    area.holes.erase(hole);
    area.free_bytes -= bytes;
    used_bytes_ += bytes;
    counts_.used_bytes_max = std::max(counts_.used_bytes_max, used_bytes_);
    return span;
  }
  return Status(
      ErrorCode::kNoSpace,
      fmt::format("the spool has no room for {} in one piece: {} of its {} are free",
                  base::format_bytes(bytes), base::format_bytes(size_bytes_ - used_bytes_),
                  base::format_bytes(size_bytes_)),
      "Make the spool larger (UpdaterOptions::spool_bytes).");
}

void Spool::free(const Span& span) {
  Area& area = areas_[span.area];
  uint64_t offset = span.offset_bytes;
  uint64_t bytes = span.data.size();
  area.free_bytes += bytes;
  used_bytes_ -= bytes;
  const auto after = area.holes.upper_bound(offset);
  if (after != area.holes.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
    }
  }
  if (after != area.holes.end() && after->first == span.offset_bytes + span.data.size()) {
    bytes += after->second;
    area.holes.erase(after);
  }
  area.holes[offset] = bytes;
}

Spool::Span& Spool::span_of(Ticket ticket) {
  const auto found = spans_.find(ticket.value);
  SI_CHECK(found != spans_.end(), "a ticket that was not given, or was dropped");
  return found->second;
}

Result<Spool::Ticket> Spool::put(std::span<const std::byte> data) {
  SI_RETURN_IF_ERROR(check_memory(data));
  SI_ASSIGN_OR_RETURN(Span span, allocate(data.size()));
  span.data = data;
  const Ticket ticket{next_ticket_++};
  span.put = replies_.submit(*areas_[span.area].device, csd::PutSpool{span.offset_bytes, data});
  under_way_[span.put] = ticket.value;
  spans_[ticket.value] = std::move(span);
  counts_.put_bytes += data.size();
  return ticket;
}

void Spool::take(csd::Completion&& done) {
  const auto found = under_way_.find(done.command);
  SI_CHECK(found != under_way_.end(), "an answer to what was not asked");
  Span& span = spans_.at(found->second);
  const bool put = span.put == done.command;
  failed_ = failed_ || !done.status.ok();
  (put ? span.put_status : span.get_status) = std::move(done.status);
  (put ? span.put : span.get) = nullptr;
  under_way_.erase(found);
}

void Spool::wait_for(const csd::Command* const& command) {
  while (command != nullptr) take(replies_.next());
}

bool Spool::settled(Ticket ticket) {
  Span& span = span_of(ticket);
  const auto& command = span.got ? span.get : span.put;
  while (command != nullptr) {
    csd::Completion done = replies_.poll();
    if (done.command == nullptr) return false;
    take(std::move(done));
  }
  return true;
}

Status Spool::wait(Ticket ticket) {
  Span& span = span_of(ticket);
  if (span.got) {
    wait_for(span.get);
    return span.get_status;
  }
  wait_for(span.put);
  span.waited = true;
  return span.put_status;
}

Status Spool::start_get(Ticket ticket, std::span<std::byte> out) {
  Span& span = span_of(ticket);
  SI_RETURN_IF_ERROR(check_memory(out));
  if (out.size() != span.data.size()) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("{} bytes are wanted back of {} that were put", out.size(), span.data.size()));
  }
  if (span.get != nullptr) {
    return Status(ErrorCode::kFailedPrecondition, "the last get of it is still under way",
                  "Call wait() first.");
  }
  if (!span.waited) {
    std::memcpy(out.data(), span.data.data(), out.size());
    span.got = true;
    counts_.copied_bytes += out.size();
    return Status();
  }
  SI_RETURN_IF_ERROR(span.put_status);
  span.got = true;
  span.get = replies_.submit(*areas_[span.area].device, csd::GetSpool{span.offset_bytes, out});
  under_way_[span.get] = ticket.value;
  counts_.got_bytes += out.size();
  return Status();
}

void Spool::drop(Ticket ticket) {
  Span& span = span_of(ticket);
  wait_for(span.put);
  wait_for(span.get);
  free(span);
  spans_.erase(ticket.value);
}

void Spool::retire(std::shared_ptr<void> memory) {
  if (failed_) storage::leak_in_flight(std::move(memory));
}

}  // namespace smartinf::engine
