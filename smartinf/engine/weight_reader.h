// Weights that nobody updates, read from files by threads of their own as often as they are wanted.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "smartinf/base/worker.h"
#include "smartinf/engine/weight_source.h"

namespace smartinf::engine {

/// Files of weights. A read that hangs keeps them, whatever has become of the reader.
class WeightFileSet {
 public:
  virtual ~WeightFileSet() = default;
  /// Puts the weights of a subgroup to out, [count] of type. Threads: several at once.
  virtual base::Status read(const plan::Subgroup& subgroup, base::DataType type,
                            std::byte* out) const = 0;
  /// The file of a subgroup, for messages.
  virtual std::string path_of(const plan::Subgroup& subgroup) const = 0;
};

/// Threads: one caller.
class WeightReader : public WeightSource {
 public:
  /// subgroup_elements are read at once.
  WeightReader(uint64_t elements, uint64_t subgroup_elements,
               std::shared_ptr<const WeightFileSet> files);
  /// Waits for the reads that have begun, but not for those that hang.
  ~WeightReader() override;

  uint64_t elements() const { return elements_; }
  /// While reads are under way and none ends for so long, the drive counts as one that does not
  /// answer. As long as for devices (UpdaterOptions::device_silence_max).
  void set_silence_max(std::chrono::nanoseconds silence_max) { silence_max_ = silence_max; }

  base::Status load_weights(base::DataType type, const WeightsSink& sink) override;
  base::Status wait_weights(uint64_t, uint64_t) override { return base::Status(); }
  plan::Subgroup subgroup_at(uint64_t element) const override;
  base::Status fetch_weights(uint64_t first, base::DataType type, void* out) override;
  /// Errors also: kTimeout, with the file that is not read, here and for every later fetch.
  base::Status wait_fetched(uint64_t first) override;
  bool has_fetched(uint64_t first) const override;
  bool hangs() const override { return hangs_; }

 private:
  struct Reads;
  struct Fetch {
    plan::Subgroup subgroup;
    base::DataType type = base::DataType::kBf16;
    std::byte* out = nullptr;
  };
  base::Status given_up(uint64_t first) const;

  const uint64_t elements_;
  const uint64_t subgroup_elements_;
  std::chrono::nanoseconds silence_max_ = std::chrono::minutes(10);
  const std::shared_ptr<Reads> reads_;  // with the threads
  bool hangs_ = false;
  std::optional<base::Worker<Fetch>> worker_;  // from the first fetch on
};

}  // namespace smartinf::engine
