// The superblock of an open store and its copies on the drive: two pairs, written in turn, so that
// the pair that holds the last superblock known to be on the medium is never the one being written.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/status.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/io_pump.h"

namespace smartinf::storage {

/// Threads: one at a time, the pump's.
class SuperblockPairs {
 public:
  /// `pump` outlives it; `file_path` is for messages. With `durable` a step survives power loss:
  /// only what was written durably, or synced, counts as being on the medium.
  SuperblockPairs(IoPump& pump, std::string file_path, bool durable)
      : pump_(pump), file_path_(std::move(file_path)), durable_(durable) {}
  base::Status allocate();
  /// Takes the memory that allocate() allocated: the drive may still write there.
  base::AlignedBuffer take_memory() { return std::move(images_); }

  /// Sets the superblock that open() found.
  void set_found(const Superblock& found);
  /// Says that the one that was found is the last one written, on the medium or not.
  void keep_found() { written_pair_ = value_.copy % kSuperblockPairs; }

  /// Writes the value under the next sequence number, to the pair whose turn it is.
  base::Status write(bool durably);
  /// Whether the newest superblock on the drive is this store's own. Errors: kBusy when somebody
  /// else has written one since; the drive's are not checked here.
  base::Status check_newest();
  /// Makes everything that was written to the container durable.
  base::Status sync();

  /// Bytes written by this store over its whole life.
  uint64_t bytes_written_ever() const;

  /// The superblock that the next write() writes.
  Superblock& value() { return value_; }
  const Superblock& value() const { return value_; }

 private:
  IoPump& pump_;
  std::string file_path_;
  bool durable_;
  Superblock value_{};
  base::AlignedBuffer images_;   // kSuperblockCopies of them
  uint64_t written_before_ = 0;  // bytes_written_ever at open
  uint32_t durable_pair_ = 0;    // holds the last superblock known to be on the medium
  uint32_t written_pair_ = 0;    // holds the last one that was written without an error
};

}  // namespace smartinf::storage
