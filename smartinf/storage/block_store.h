// The store: subgroups in a container, with the metadata that makes a step atomic.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/traffic.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/store.h"
#include "smartinf/storage/transfer_queue.h"

namespace smartinf::storage {

class BlockStore final : public Store {
 public:
  /// On a container of at least the geometry's bytes.
  static base::Result<std::unique_ptr<BlockStore>> create(Container container,
                                                          const StoreLayout& layout,
                                                          const StoreOptions& options);
  static base::Result<std::unique_ptr<BlockStore>> open(Container container,
                                                        const StoreOptions& options);
  ~BlockStore() override;
  base::Status close() override { return queue_->close(); }

  const StoreLayout& layout() const override { return layout_; }
  const std::string& path() const override { return container_.path; }
  std::string_view ring_name() const override { return ring_name_; }
  StoreState state() const override;
  Durability durability() const override { return options_.durability; }
  std::string client_metadata() const override;
  base::Status recover_to(base::StepNumber step) override;

  uint64_t extent_bytes(base::SubgroupId subgroup) const override;
  uint64_t plane_offset(base::SubgroupId subgroup, size_t plane) const override;
  uint64_t plane_bytes(base::SubgroupId subgroup, size_t plane) const override;
  uint64_t gradient_bytes(base::SubgroupId subgroup) const override;
  uint64_t extent_bytes_max() const override { return geometry_.extent_bytes_max(); }

  base::Status register_memory(std::span<std::byte> memory) override;
  void start(SubgroupIo& io) override;
  base::Result<size_t> poll(std::span<SubgroupIo*> done, std::chrono::nanoseconds wait) override;

  base::Status verify_block(base::SubgroupId subgroup, size_t plane, uint64_t block,
                            std::span<const std::byte> bytes) const override;
  void seal_block(base::SubgroupId subgroup, size_t plane, uint64_t block,
                  std::span<const std::byte> bytes) override;
  base::Status hold(base::SubgroupId subgroup, uint32_t plane_mask) override;
  base::Status finish_flush() override;
  void begin_step(base::StepNumber step) override;
  base::Status prepare(base::StepNumber step, const std::string& client_metadata) override;
  base::Status commit(base::StepNumber step) override;
  base::Status abort(base::StepNumber step) override;

  base::TrafficReading traffic() const override { return traffic_.read(); }
  uint64_t bytes_written_ever() const override;

  /// For benchmarks: until end_write_benchmark() writes go where those of a step would, but no step
  /// knows of them. What a subgroup is written with must be what was read from it: with one slot it
  /// stays.
  void begin_write_benchmark();
  /// Waits for the writes and makes them durable as prepare() would.
  base::Status end_write_benchmark();

  const Geometry& geometry() const { return geometry_; }

 private:
  /// How far the step in progress is.
  enum class StepPhase : uint8_t {
    kUnrecovered,  // opened; recover_to has not been called
    kIdle,         // the committed state, nothing in progress
    kWriting,      // begin_step was called
    kPreparing,    // prepare has written a superblock, or tried to
    kPrepared,
    kWriteBenchmark,  // see begin_write_benchmark
    kBroken,          // an abort failed: what is on the drive is not known
  };
  /// A piece of a SubgroupIo on its way, at most io_bytes long.
  struct Piece {
    Transfer transfer;
    SubgroupIo* io = nullptr;
    Piece* next_free = nullptr;
    bool write = false;
  };
  /// First in, first out through SubgroupIo::next.
  struct IoList {
    SubgroupIo* first = nullptr;
    SubgroupIo* last = nullptr;
    void push(SubgroupIo* io);
    SubgroupIo* pop();
  };
  /// Where the next piece of a SubgroupIo goes; length 0: there is none.
  struct Span {
    uint64_t buffer_offset = 0;
    uint64_t offset_bytes = 0;
    uint64_t length = 0;
  };

  BlockStore(Container container, StoreOptions options, StoreLayout layout, Geometry geometry);
  base::Status allocate();
  base::Status format_container();

  bool durable() const { return options_.durability == Durability::kStep; }
  uint32_t shadow_slot(uint32_t slot) const { return geometry_.slots() == 2 ? 1 - slot : 0; }

  // Tables in memory are images of those on the drive, one per place.
  std::span<std::byte> table(base::StepNumber step) const;
  PlaneRecord record(base::StepNumber step, size_t subgroup, size_t plane) const;
  void set_record(base::StepNumber step, size_t subgroup, size_t plane, const PlaneRecord& record);
  uint64_t* checksums(base::StepNumber step, size_t subgroup, size_t plane) const;
  void begin_table(base::StepNumber step);
  base::Status finish_table(base::StepNumber step, const std::string& client_metadata);
  base::Status check_written(base::StepNumber step) const;
  base::Status read_table(base::StepNumber step, uint64_t bytes, uint64_t checksum);

  // Metadata goes through the same queue as the planes, and is waited for.
  base::Status write_superblock(bool durable);
  /// Whether the newest superblock on the drive is this store's own. Errors: kBusy when somebody
  /// else has written one since; the drive's are not judged here.
  base::Status check_newest();
  base::Status write_metadata(std::span<const Transfer> transfers);
  base::Status sync_container();
  base::Status move_metadata(std::span<const Transfer> transfers);

  void pump();
  void start_pieces(IoList& list, bool write);
  Span next_span(SubgroupIo& io) const;
  void finish_piece(Piece& piece);
  void finish_if_done(SubgroupIo& io);
  base::Status step_queue(std::chrono::nanoseconds wait);
  base::Status drain(bool writes_only);
  base::Status begin_writing();
  void note_written_planes(size_t subgroup, uint32_t plane_mask, bool held);
  void forget_held(size_t subgroup, uint32_t plane_mask);

  Container container_;
  StoreOptions options_;
  StoreLayout layout_;
  Geometry geometry_;
  std::string ring_name_;
  uint64_t device_seed_ = 0;

  Superblock superblock_{};
  uint32_t durable_pair_ = 0;  // copies that hold the last superblock known to be on the medium
  uint32_t written_pair_ = 0;  // copies that hold the last one that was written without an error
  StepPhase phase_ = StepPhase::kUnrecovered;
  base::StepNumber step_ = 0;           // in progress, when phase_ is kWriting or later
  bool step_written_ = false;           // some write of it was started
  base::Status step_failure_;           // of a write of the step in progress
  std::vector<uint8_t> sealed_;         // of the step in progress, per block of each plane
  std::vector<uint64_t> sealed_first_;  // per subgroup and plane: its first entry in sealed_
  std::vector<uint8_t> held_;           // per subgroup and plane: hold() keeps it in memory
  uint64_t held_count_ = 0;

  base::AlignedBuffer tables_;         // kTablePlaces images
  base::AlignedBuffer superblock_io_;  // kSuperblockCopies images
  // In flight for as long as the drive wants: neither on the stack nor tied to this object.
  std::unique_ptr<std::array<Transfer, kSuperblockCopies>> metadata_ =
      std::make_unique<std::array<Transfer, kSuperblockCopies>>();

  base::TrafficCounter traffic_;
  uint64_t written_before_ = 0;  // bytes_written_ever at open

  std::unique_ptr<TransferQueue> queue_;
  base::Status ring_failure_;  // of the ring itself; nothing goes on after it
  std::vector<Piece> pieces_;  // 2 x io_depth, from the start
  Piece* free_piece_ = nullptr;
  std::array<uint32_t, 2> pieces_in_flight_{};  // reads, writes
  uint32_t writes_open_ = 0;                    // SubgroupIos that write and are not finished
  uint32_t reads_open_ = 0;
  uint32_t metadata_open_ = 0;
  IoList waiting_reads_;
  IoList waiting_writes_;
  IoList finished_;
};

}  // namespace smartinf::storage
