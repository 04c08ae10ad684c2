#include "smartinf/train/offload_choice.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/units.h"

namespace smartinf::train {

base::Result<SpoolRates> measure_spool(engine::Spool& spool, std::span<std::byte> memory) {
  constexpr uint64_t kBytesMax = 256 * base::kMiB;
  constexpr uint64_t kPieceBytes = 4 * base::kMiB;
  memory =
      memory.first(std::min(memory.size(), kBytesMax) / base::kIoAlignment * base::kIoAlignment);
  uint64_t noise = 1;  // some drives are fast with zeros
  for (uint64_t i = 0; i + sizeof(noise) <= memory.size(); i += sizeof(noise)) {
    noise = noise * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(&memory[i], &noise, sizeof(noise));
  }
  const auto piece = [&](uint64_t at) {
    return memory.subspan(at, std::min(kPieceBytes, memory.size() - at));
  };
  std::vector<engine::Spool::Ticket> tickets;
  const uint64_t begin_ns = base::now_ns();
  for (uint64_t at = 0; at < memory.size(); at += kPieceBytes) {
    SI_ASSIGN_OR_RETURN(const engine::Spool::Ticket ticket, spool.put(piece(at)));
    tickets.push_back(ticket);
  }
  for (const engine::Spool::Ticket ticket : tickets) SI_RETURN_IF_ERROR(spool.wait(ticket));
  const uint64_t written_ns = base::now_ns();
  for (size_t i = 0; i < tickets.size(); ++i) {
    SI_RETURN_IF_ERROR(spool.start_get(tickets[i], piece(i * kPieceBytes)));
  }
  for (const engine::Spool::Ticket ticket : tickets) SI_RETURN_IF_ERROR(spool.wait(ticket));
  const auto bytes = static_cast<double>(memory.size()) * 1e9;
  const SpoolRates rates{bytes / static_cast<double>(written_ns - begin_ns),
                         bytes / static_cast<double>(base::now_ns() - written_ns)};
  for (const engine::Spool::Ticket ticket : tickets) spool.drop(ticket);
  return rates;
}

bool is_offloaded(uint64_t entry, uint64_t offloaded, uint64_t in_memory, uint64_t entries) {
  offloaded = std::min(offloaded, entries);
  const uint64_t last = std::min(in_memory, offloaded);
  const uint64_t others = entries - last;
  if (entry >= others) return true;
  return (entry + 1) * (offloaded - last) / others > entry * (offloaded - last) / others;
}

std::string OffloadChoice::stepped(const Measured& step) {
  if (decided_) return "";
  if (!warm_) {
    warm_ = true;
    return "";
  }
  Trial& trial = trials_.back();
  if (step.seconds < trial.fastest.seconds) trial.fastest = step;
  if (++trial.steps < kSteps) return "";
  const uint64_t another = trials_.size() < kTrials ? next() : trial.offloaded;
  const bool tried = std::ranges::any_of(
      trials_, [&](const Trial& before) { return before.offloaded == another; });
  if (tried) return decide();
  trials_.push_back({another});
  return "";
}

/// The number to try next; one that was tried: no other is better.
uint64_t OffloadChoice::next() const {
  constexpr double kWaitedLittle = 0.02;  // of a step
  const Measured& without = trials_.front().fastest;
  const Measured& last = trials_.back().fastest;
  const double drives_s = static_cast<double>(without.read_bytes) / entries_.rates.read +
                          static_cast<double>(without.written_bytes) / entries_.rates.write;
  const auto bytes = static_cast<double>(entries_.bytes);
  const double moved_s = bytes / entries_.rates.write + bytes / entries_.rates.read;
  if (trials_.size() == 1) return as_many_as_fit(drives_s, moved_s);
  const uint64_t offloaded = trials_.back().offloaded;
  if (last.waited_s <= kWaitedLittle * last.seconds || offloaded <= entries_.in_memory) {
    return offloaded;
  }
  // The drives were slower than measured: as fast as they were in this step.
  const double slower_s =
      (last.seconds - drives_s) / static_cast<double>(offloaded - entries_.in_memory);
  return std::min(offloaded, as_many_as_fit(drives_s, std::max(moved_s, slower_s)));
}

/// With n entries offloaded a step is shorter by what they take to compute, and the drives, which
/// are busy for drives_s without, have those to move that do not stay in memory.
uint64_t OffloadChoice::as_many_as_fit(double drives_s, double moved_s) const {
  const Measured& without = trials_.front().fastest;
  const auto count = static_cast<double>(entries_.count);
  const auto in_memory = static_cast<double>(entries_.in_memory);
  const double computed_s = without.forward_s / count;
  const double fit = (without.seconds - drives_s + in_memory * moved_s) / (moved_s + computed_s);
  return static_cast<uint64_t>(std::clamp(fit, std::min(in_memory, count), count));
}

std::string OffloadChoice::decide() {
  const Trial all_again = trials_.front();
  const auto fastest = std::ranges::min_element(
      trials_, {}, [](const Trial& trial) { return trial.fastest.seconds; });
  const bool gains = fastest->fastest.seconds <= (1 - kGain) * all_again.fastest.seconds;
  const Trial chosen = gains ? *fastest : all_again;
  std::string why = fmt::format("a step takes {} where all units are computed again",
                                base::format_seconds(all_again.fastest.seconds));
  for (const Trial& trial : trials_) {
    if (trial.offloaded == 0) continue;
    why += fmt::format(", {} with {} offloaded", base::format_seconds(trial.fastest.seconds),
                       trial.offloaded);
  }
  if (trials_.size() == 1) why += ", and leaves the drives no time for more";
  trials_ = {chosen};
  decided_ = true;
  return fmt::format("{} of {} units and micro batches are offloaded from now on: {}",
                     chosen.offloaded, entries_.count, why);
}

}  // namespace smartinf::train
