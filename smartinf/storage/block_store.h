// The store: subgroups in a container, with the metadata that makes a step atomic. Here is the
// order in which a step is written, prepared, committed or aborted; how bytes move is io_pump.h's,
// what the table says plane_table.h's, which copy of the superblock is written
// superblock_pairs.h's.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "smartinf/base/traffic.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/io_pump.h"
#include "smartinf/storage/plane_table.h"
#include "smartinf/storage/store.h"
#include "smartinf/storage/superblock_pairs.h"

namespace smartinf::storage {

class BlockStore final : public Store, private IoPump::Owner {
 public:
  /// On a container of at least the geometry's bytes.
  static base::Result<std::unique_ptr<BlockStore>> create(Container container,
                                                          const StoreLayout& layout,
                                                          const StoreOptions& options);
  static base::Result<std::unique_ptr<BlockStore>> open(Container container,
                                                        const StoreOptions& options);
  ~BlockStore() override;
  base::Status close() override { return pump_.close(); }

  const StoreLayout& layout() const override { return layout_; }
  const std::string& path() const override { return container_.path; }
  std::string_view ring_name() const override { return ring_name_; }
  StoreState state() const override;
  Durability durability() const override { return options_.durability; }
  std::string client_metadata() const override;
  base::Result<std::unique_ptr<StateReader>> read_committed() const override;
  base::Status recover_to(base::StepNumber step) override;

  uint64_t extent_bytes(base::SubgroupId subgroup) const override;
  uint64_t plane_offset(base::SubgroupId subgroup, size_t plane) const override;
  uint64_t plane_bytes(base::SubgroupId subgroup, size_t plane) const override;
  uint64_t gradient_bytes(base::SubgroupId subgroup) const override;
  uint64_t extent_bytes_max() const override { return geometry_.extent_bytes_max(); }
  uint64_t spool_bytes() const override { return options_.spool_bytes; }

  base::Status register_memory(std::span<std::byte> memory) override {
    return pump_.register_memory(memory);
  }
  void start(SubgroupIo& io) override;
  base::Result<size_t> poll(std::span<SubgroupIo*> done, std::chrono::nanoseconds wait) override {
    return pump_.poll(done, wait);
  }

  base::Status verify_block(base::SubgroupId subgroup, size_t plane, uint64_t block,
                            std::span<const std::byte> bytes) const override;
  void seal_block(base::SubgroupId subgroup, size_t plane, uint64_t block,
                  std::span<const std::byte> bytes) override;
  std::optional<BlockSum> expected_sum(base::SubgroupId subgroup, size_t plane,
                                       uint64_t block) const override;
  std::optional<uint64_t> seal_seed(base::SubgroupId subgroup, size_t plane,
                                    uint64_t block) const override;
  void seal_block(base::SubgroupId subgroup, size_t plane, uint64_t block,
                  uint64_t checksum) override;
  base::Status hold(base::SubgroupId subgroup, uint32_t plane_mask) override;
  base::Status finish_flush() override;
  void begin_step(base::StepNumber step) override;
  base::Status prepare(base::StepNumber step, const std::string& client_metadata) override;
  base::Status commit(base::StepNumber step) override;
  base::Status abort(base::StepNumber step) override;

  base::TrafficReading traffic() const override { return pump_.traffic(); }
  uint64_t bytes_written_ever() const override { return superblocks_.bytes_written_ever(); }

  /// Waits for the writes in flight and makes them durable, if a step's are.
  base::Status sync();

  const Geometry& geometry() const { return geometry_; }

 private:
  /// How far the step in progress is.
  enum class StepPhase : uint8_t {
    kUnrecovered,  // opened; recover_to has not been called
    kIdle,         // the committed state, nothing in progress
    kWriting,      // begin_step was called
    kPreparing,    // prepare has written a superblock, or tried to
    kPrepared,
    kBroken,  // an abort failed: what is on the drive is not known
  };

  BlockStore(Container container, StoreOptions options, StoreLayout layout, Geometry geometry);
  base::Status allocate();
  base::Status place_spool();
  base::Status format_container();

  // Calls of the pump.
  IoPump::Span next_span(SubgroupIo& io) const override;
  IoPump::Span next_span_within(SubgroupIo& io, uint64_t offset_bytes, uint64_t bytes) const;
  void on_finished(const SubgroupIo& io) override;

  bool durable() const { return options_.durability == Durability::kStep; }
  uint32_t shadow_slot(uint32_t slot) const { return geometry_.slots() == 2 ? 1 - slot : 0; }
  /// Where the step in progress writes a plane.
  uint32_t written_slot(size_t subgroup, size_t plane) const;
  Superblock& superblock() { return superblocks_.value(); }
  const Superblock& superblock() const { return superblocks_.value(); }
  /// Whether there is no first step yet.
  bool creating() const { return superblock().phase == Phase::kCreating; }
  /// The container as the place of an error, without an offset.
  base::ErrorPlace place() const { return base::ErrorPlace{container_.file_path, {}, {}, 0}; }

  base::Status begin_writing();
  void note_written_planes(size_t subgroup, uint32_t plane_mask);
  base::Status write_table(base::StepNumber step, const std::string& client_metadata);
  base::Status read_table(base::StepNumber step, uint64_t bytes, uint64_t checksum);

  Container container_;
  StoreOptions options_;
  StoreLayout layout_;
  Geometry geometry_;
  std::string ring_name_;
  uint64_t device_seed_ = 0;
  uint64_t spool_first_byte_ = 0;  // in its file

  StepPhase phase_ = StepPhase::kUnrecovered;
  base::StepNumber step_ = 0;  // in progress, when phase_ is kWriting or later
  bool step_written_ = false;  // some write of it was started
  base::Status step_failure_;  // of a write of the step in progress

  IoPump pump_;
  SuperblockPairs superblocks_;
  PlaneTable table_;
};

}  // namespace smartinf::storage
