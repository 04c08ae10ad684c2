// What tables' rows take of this machine's drives and cores with nothing else, for the simulator
// (sim::Host, sim::DeviceGroup).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/row_rules.h"
#include "smartinf/sim/machine.h"
#include "smartinf/storage/file_descriptor.h"
#include "smartinf/storage/ring.h"
#include "smartinf/storage/row_format.h"

namespace smartinf::apps {

/// Reads pages of a file at random, as they ascend, and writes another one from its start on, as a
/// file of tables' rows is read and written.
class PagesAlone {
 public:
  static constexpr uint32_t kReads = storage::RowGeometry::kReadsMax;
  static constexpr uint32_t kWrites = storage::RowGeometry::kChunks;
  static constexpr uint64_t kWriteBytes = storage::RowGeometry::kChunkBytes;

  ~PagesAlone();

  /// pages: those at the end of read_path. The other file is made, and removed at the end. Errors:
  /// kIo, kOutOfMemory.
  base::Status open(const std::string& read_path, const std::string& written_path,
                    uint64_t page_bytes, uint64_t pages);
  base::Status read(uint64_t pages);
  /// And a sync behind it, likewise below.
  base::Status write(uint64_t bytes);
  /// Pages of what write() has written, at random.
  base::Status write_pages(uint64_t pages, uint64_t written_bytes);

 private:
  base::Status sync();
  base::Status move(storage::IoOp op, uint32_t file, uint32_t depth, uint64_t bytes, uint64_t count,
                    const std::function<uint64_t(uint64_t)>& offset_of);

  std::string path_, written_;
  storage::FileDescriptor file_, log_;
  uint64_t page_bytes_ = 0, pages_ = 0, first_page_ = 0;
  uint32_t read_file_ = 0, write_file_ = 0;
  base::AlignedBuffer memory_;
  std::array<storage::IoRequest, kReads> requests_;
  std::mt19937_64 random_{2};
  std::unique_ptr<storage::Ring> ring_;  // destroyed first
};

/// Steps of a table on a device.
struct RowWork {
  uint64_t rows = 1'000'000;
  uint32_t dim = 64;
  uint64_t batch = 100'000;  // ids of a step
  kernels::RowRule rule = kernels::RowRule::kSparseAdam;
  base::DataType gradient_type = base::DataType::kBf16;
  uint64_t memory_bytes = 256 * base::kMiB;  // of the cache of rows
};
/// Seconds that a row takes of the host's thread and of a device's, with nothing on drives: row_s
/// of the host; page_s, row_s and row_bytes_per_s of all devices.
void time_rows(const RowWork& work, sim::Machine& machine);

/// page_reads_per_s, page_writes_per_s and sync_s of the drive that has a directory, in a file of
/// 256 MiB there. Errors: PagesAlone's.
base::Status measure_pages(const std::string& directory, sim::DeviceGroup& device);

}  // namespace smartinf::apps
