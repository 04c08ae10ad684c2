// Counted bytes. Every link and every store keeps one of these; a traffic claim is a reading of it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string_view>

namespace smartinf::base {

/// The purpose of the bytes.
enum class TrafficKind : uint8_t {
  kState = 0,
  kGradient = 1,
  kWeight = 2,
  kMetadata = 3,
  kActivation = 4,
  kCache = 5,  // keys and values, and queries over them
};
inline constexpr size_t kTrafficKinds = 6;

constexpr std::string_view traffic_kind_name(TrafficKind kind) {
  switch (kind) {
    case TrafficKind::kState: return "state";
    case TrafficKind::kGradient: return "gradient";
    case TrafficKind::kWeight: return "weight";
    case TrafficKind::kMetadata: return "metadata";
    case TrafficKind::kActivation: return "activation";
    case TrafficKind::kCache:
      return "cache";
  }
  return "?";
}

/// Up is towards the host (for a store: read); down is away from it (for a store: written).
struct TrafficReading {
  std::array<uint64_t, kTrafficKinds> up_bytes{};
  std::array<uint64_t, kTrafficKinds> down_bytes{};

  uint64_t up_total() const {
    uint64_t total = 0;
    for (const uint64_t bytes : up_bytes) total += bytes;
    return total;
  }
  uint64_t down_total() const {
    uint64_t total = 0;
    for (const uint64_t bytes : down_bytes) total += bytes;
    return total;
  }
  uint64_t up(TrafficKind kind) const { return up_bytes[static_cast<size_t>(kind)]; }
  uint64_t down(TrafficKind kind) const { return down_bytes[static_cast<size_t>(kind)]; }

  TrafficReading& operator+=(const TrafficReading& other) {
    for (size_t i = 0; i < kTrafficKinds; ++i) {
      up_bytes[i] += other.up_bytes[i];
      down_bytes[i] += other.down_bytes[i];
    }
    return *this;
  }
  /// The traffic between an earlier reading and this one.
  TrafficReading since(const TrafficReading& earlier) const {
    TrafficReading delta = *this;
    for (size_t i = 0; i < kTrafficKinds; ++i) {
      delta.up_bytes[i] -= earlier.up_bytes[i];
      delta.down_bytes[i] -= earlier.down_bytes[i];
    }
    return delta;
  }
};

/// Threads: all members are safe from any thread.
class TrafficCounter {
 public:
  void add_up(TrafficKind kind, uint64_t bytes) {
    up_bytes_[static_cast<size_t>(kind)].fetch_add(bytes, std::memory_order_relaxed);
  }
  void add_down(TrafficKind kind, uint64_t bytes) {
    down_bytes_[static_cast<size_t>(kind)].fetch_add(bytes, std::memory_order_relaxed);
  }
  TrafficReading read() const {
    TrafficReading reading;
    for (size_t i = 0; i < kTrafficKinds; ++i) {
      reading.up_bytes[i] = up_bytes_[i].load(std::memory_order_relaxed);
      reading.down_bytes[i] = down_bytes_[i].load(std::memory_order_relaxed);
    }
    return reading;
  }

 private:
  std::array<std::atomic<uint64_t>, kTrafficKinds> up_bytes_{};
  std::array<std::atomic<uint64_t>, kTrafficKinds> down_bytes_{};
};

}  // namespace smartinf::base
