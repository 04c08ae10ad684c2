// A store's tables in memory: for each plane of each subgroup which step wrote it, in which slot,
// and the checksums of its blocks. One image per place on the drive, as it lies there
// (docs/format.md), so a step in progress changes its own and leaves the committed one alone. What
// is not on the drive stands beside the images: which blocks the step in progress has sealed, and
// which planes are in memory only.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/status.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/store.h"

namespace smartinf::storage {

/// Threads: one at a time, but for checksum and set_checksum, which are safe for different blocks
/// at once.
class PlaneTable {
 public:
  /// `geometry` and `layout` outlive the table.
  PlaneTable(const Geometry& geometry, const StoreLayout& layout)
      : geometry_(geometry), layout_(layout) {}
  base::Status allocate();
  /// Takes the memory that allocate() allocated: the drive may still write there.
  base::AlignedBuffer take_memory() { return std::move(images_); }

  std::span<std::byte> image(base::StepNumber step) const;
  PlaneRecord record(base::StepNumber step, size_t subgroup, size_t plane) const;

  /// Makes the image of a store's first step: nothing is written.
  void begin_first(base::StepNumber step);
  /// Makes that of the step after `committed`: everything is as it was.
  void begin_after(base::StepNumber committed);
  /// In the image of `step`: the step writes the plane, to `slot`.
  void note_written(base::StepNumber step, size_t subgroup, size_t plane, uint32_t slot,
                    bool sealed);

  uint64_t checksum(base::StepNumber step, size_t subgroup, size_t plane, uint64_t block) const {
    return checksums(step, subgroup, plane)[block];
  }
  /// Sets a checksum in the step in progress, whose plane is sealed when all its blocks have one.
  void set_checksum(base::StepNumber step, size_t subgroup, size_t plane, uint64_t block,
                    uint64_t checksum);
  /// Whether the image can be prepared. Errors: kFailedPrecondition with a plane that was never
  /// written, or, where `step_wrote`, one that the step wrote without sealing all of it.
  base::Status check_written(base::StepNumber step, bool step_wrote) const;

  /// Completes the image of `step` with header and client metadata: what goes to the drive, padded.
  std::span<std::byte> finish(base::StepNumber step, const std::string& client_metadata);
  TableHeader header(base::StepNumber step) const;
  std::string client_metadata(base::StepNumber step) const;

  /// Planes that Store::hold keeps in memory, until they are written.
  void hold(size_t subgroup, uint32_t plane_mask);
  void forget_held(size_t subgroup, uint32_t plane_mask);
  bool any_held() const { return held_count_ > 0; }

 private:
  uint64_t* checksums(base::StepNumber step, size_t subgroup, size_t plane) const;
  void set_record(base::StepNumber step, size_t subgroup, size_t plane, const PlaneRecord& record);
  size_t plane_index(size_t subgroup, size_t plane) const {
    return subgroup * geometry_.planes() + plane;
  }

  const Geometry& geometry_;
  const StoreLayout& layout_;
  base::AlignedBuffer images_;          // kTablePlaces of them
  std::vector<uint8_t> sealed_;         // of the step in progress, per block of each plane
  std::vector<uint64_t> sealed_first_;  // per subgroup and plane: its first entry in sealed_
  std::vector<uint8_t> held_;           // per subgroup and plane
  uint64_t held_count_ = 0;
};

}  // namespace smartinf::storage
