// A small run on several simulated devices, its power cut at a chosen point, and the question
// whether recovery finds exactly a step that was committed everywhere.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/base/traffic.h"
#include "smartinf/storage/block_store.h"
#include "smartinf/storage/memory_ring.h"
#include "smartinf/storage/row_file.h"

#include "apps/crashtest/flawed_ring.h"

namespace smartinf::crash {

struct ScenarioOptions {
  uint32_t devices = 3;
  uint32_t steps = 4;
  base::StateFormat format;
  uint64_t elements = 1500;  // of each device's larger subgroup
  uint32_t rows = 40;        // of each device's table; 0: no tables
  /// Seed of the order of completions, of what a cut leaves, of which subgroups stay in memory, and
  /// of what is guessed.
  uint64_t seed = 1;
  CommitFlaw flaw = CommitFlaw::kNone;
};

/// One life of a run: create, steps (some aborted and made again), power cut, recovery, one more
/// step. The update is a toy with the shape of the real one: read (or have it in memory, as with a
/// state cache), verify, change, seal, write. As with optimizer.overlap = "early", some steps are
/// written in part by a guess (docs/decisions/early-updates.md): it is right, or wrong and
/// everything is written a second time in the step, or the step is aborted. A device has a table of
/// rows, too, of which a step writes some into a log that is merged now and then; its commits are
/// those of the blocks.
class Scenario {
 public:
  explicit Scenario(const ScenarioOptions& options);

  /// Runs until done or until the power goes after `cut_events`.
  void run(uint64_t cut_events = ~uint64_t{0});
  uint64_t events() const { return power_.events(); }
  /// The part of the run at which it ended.
  std::string_view moment() const { return moment_; }

  /// Gives each drive what it holds once the power is back.
  void settle(storage::CutFate fate, uint64_t seed);
  /// Recovers, with the power going again after `cut_events`, to see that recovery can be repeated.
  void recover_and_cut(uint64_t cut_events);
  /// Recovers and checks everything. Empty: nothing lost. Otherwise what is wrong.
  std::string recover_and_judge();

  /// State for trying several fates from the same cut.
  std::vector<storage::MemoryDisk> disks() const { return disks_; }
  void set_disks(const std::vector<storage::MemoryDisk>& disks) { disks_ = disks; }

 private:
  enum class Guess { kNone, kRight, kWrong, kAborted };
  /// The content of a write: the step's new state, what a wrong guess makes of it, or something in
  /// every plane that will be aborted.
  enum class Contents { kOfStep, kWrong, kAborted };
  /// A subgroup as a write left it; not current when that was garbage.
  struct InMemory {
    base::AlignedBuffer buffer;
    bool current = false;
  };
  struct Device {
    std::unique_ptr<storage::BlockStore> store;
    std::map<uint32_t, InMemory> in_memory;  // by subgroup; goes when the power does
    std::unique_ptr<storage::RowFile> rows;
    bool appending = false;  // rows of a step
    void close() {
      store.reset();
      rows.reset();
      appending = false;
    }
  };
  bool stays_in_memory(uint32_t device, uint32_t subgroup) const;
  storage::Container container(uint32_t device);
  storage::CachePlace row_place(uint32_t device);
  storage::StoreLayout layout(uint32_t device) const;
  storage::RowFileLayout row_layout(uint32_t device) const;
  uint32_t word(uint32_t device, uint32_t subgroup, uint32_t plane, uint64_t index,
                base::StepNumber step) const;
  base::Status create();
  base::Status open(bool with_flaw);
  base::Result<base::StepNumber> recover();
  Guess guess_in(base::StepNumber step) const;
  uint32_t guessed(uint32_t device, base::StepNumber step) const;
  /// subgroups: one bit each.
  base::Status write_step(uint32_t device, base::StepNumber step, uint32_t subgroups,
                          Contents contents);
  bool touched(uint32_t device, uint32_t row, base::StepNumber step) const;
  std::vector<std::byte> record(uint32_t device, uint32_t row, base::StepNumber version) const;
  base::Status write_rows(uint32_t device, base::StepNumber step, Contents contents);
  base::Status write_everywhere(base::StepNumber step);
  base::Status abort_everywhere(base::StepNumber step);
  base::Status prepare(Device& device, base::StepNumber step, const std::string& metadata);
  base::Status commit(uint32_t device, base::StepNumber step);
  base::Status make_step(base::StepNumber step);
  base::Status all_steps();
  base::Status read(uint32_t device, base::SubgroupId id, std::span<std::byte> buffer);
  base::Status verify(uint32_t device, uint32_t subgroup, std::span<const std::byte> buffer);
  std::string compare(base::StepNumber step);
  std::string compare_rows(uint32_t device, base::StepNumber step);
  void doing(std::string_view moment) {
    if (power_.on()) moment_ = moment;
  }

  ScenarioOptions options_;
  storage::RunId run_;
  storage::PowerSupply power_;
  std::vector<storage::MemoryDisk> disks_;  // the devices' own, then those of their rows
  base::TrafficCounter traffic_;
  std::vector<Device> devices_;
  uint64_t rings_made_ = 0;
  std::string_view moment_ = "creation";
  std::optional<base::StepNumber> acknowledged_;  // commit returned on every device
};

}  // namespace smartinf::crash
