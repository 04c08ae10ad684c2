// The file of a device's keys and values: cache blocks of sequences, each written once at a place
// of its own, and their checksums, which are in memory until they are saved. Every block can be
// computed again from its tokens, so there is no commit: what a crash leaves is what was saved
// last, and whatever has been written over since does not pass its checksum. See docs/format.md.
//
//   file   := header at 0, header at 64 KiB, extent of a sequence or a table...
//   extent := layer{layers}        layer := block{blocks} block{2}
//
// Blocks are moved by the file's owner, with transfers of its own through queue().
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/store.h"
#include "smartinf/storage/transfer_queue.h"

namespace smartinf::storage {

inline constexpr uint32_t kCacheFormatVersion = 1;
inline constexpr uint64_t kCacheMagic = 0x43464e4954524d53u;       // SMRTINFC
inline constexpr uint64_t kCacheTableMagic = 0x42464e4954524d53u;  // SMRTINFB
inline constexpr uint64_t kCacheHeaderBytes = 4096;
inline constexpr uint64_t kCacheHeaderStride = 64 * 1024;  // one damaged span takes one of them
inline constexpr uint64_t kCacheDataOffset = 2 * kCacheHeaderStride;
inline constexpr uint64_t kCacheIdentityBytesMax = 2048;

/// Properties by which a cache is one job's: all are compared when it is opened.
struct CacheIdentity {
  RunId job;
  uint32_t device_index = 0;
  uint32_t device_count = 1;
  uint32_t layers = 0;
  uint64_t block_bytes = 0;  // a multiple of kIoAlignment
  uint32_t block_tokens = 0;
  std::string text;  // what else its blocks depend on: weights, tokenizer, shape, block format

  friend bool operator==(const CacheIdentity&, const CacheIdentity&) = default;
};

/// A sequence's blocks in one layer.
struct CachedLayer {
  std::vector<uint64_t> sums;  // of its whole blocks
  uint32_t tail_tokens = 0;    // in a block that is not whole, kept beside them; 0: none
  uint32_t tail_place = 0;     // which of the two behind the blocks
  uint64_t tail_sum = 0;

  uint64_t tokens(uint32_t block_tokens) const { return sums.size() * block_tokens + tail_tokens; }
};

struct CachedSequence {
  uint64_t id = 0;
  uint64_t tokens_max = 0;
  uint64_t offset_bytes = 0;  // of its extent
  std::vector<CachedLayer> layers;
};

struct CacheHeader;  // of the file

/// Threads: one at a time, but for checksum(), place_offset() and damaged(), which are pure.
class CacheFile {
 public:
  /// Takes up what was saved there by the same job, or begins an empty file, as where the job had
  /// other devices. bytes_max: that it may grow to. traffic: where metadata is counted. Errors:
  /// kMismatch, another job's, with what differs; kCorrupt, there was something saved of which no
  /// header and table are whole: erase() helps; kIo.
  static base::Result<std::unique_ptr<CacheFile>> open(CachePlace place, CacheIdentity identity,
                                                       uint64_t bytes_max,
                                                       std::chrono::nanoseconds watchdog,
                                                       base::TrafficCounter& traffic);
  /// The last save of whatever job in a directory, to be looked at: nothing is locked or written.
  /// Errors: kNotFound; otherwise as above.
  static base::Result<std::unique_ptr<CacheFile>> open_saved(const std::string& directory);
  /// Forgets whatever a file holds.
  static base::Status erase(CachePlace& place);

  /// Null: there is none.
  CachedSequence* find(uint64_t id);
  const std::map<uint64_t, CachedSequence>& sequences() const { return sequences_; }
  /// Reserves room for tokens_max in every layer. Errors: kAlreadyExists; kNoSpace with what is
  /// needed and free, after which nothing has changed; kInvalidArgument.
  base::Result<CachedSequence*> add(uint64_t id, uint64_t tokens_max);
  /// Its room is free. Nothing of it is being moved.
  void remove(uint64_t id);

  /// Places of a layer: its blocks, and two behind them for one that is not whole.
  uint64_t blocks(const CachedSequence& sequence) const;
  uint64_t place_offset(const CachedSequence& sequence, uint32_t layer, uint64_t place) const;
  /// Its identity is part of a block's checksum: the job, the sequence, the layer and the place.
  uint64_t checksum(uint64_t sequence, uint32_t layer, uint64_t place,
                    std::span<const std::byte> block) const;
  /// The error of a block that is not what was written. kCorrupt.
  base::Status damaged(const CachedSequence& sequence, uint32_t layer, uint64_t place) const;

  /// Makes everything that was written and is in the tables durable. Nothing is in flight.
  /// Errors: the drive's; kNoSpace. After them the last save stands.
  base::Status save();
  uint64_t saves() const { return mark_; }

  /// Bytes of a sequence's blocks.
  uint64_t saved_bytes(const CachedSequence& sequence) const;
  /// Reads all of them. found: a block that cannot be read or is not what was written. progress:
  /// bytes done and all; what it returns ends the call. Errors: those of progress.
  base::Status verify(const std::function<base::Status(uint64_t, uint64_t)>& progress,
                      const std::function<void(const base::Status&)>& found);

  TransferQueue& queue() { return *queue_; }
  const CacheIdentity& identity() const { return identity_; }
  const std::string& path() const { return queue_->path(); }
  /// See TransferQueue::close.
  base::Status close() { return queue_->close(); }

 private:
  struct Extent {
    uint64_t offset_bytes = 0, bytes = 0;
  };
  CacheFile(CachePlace place, CacheIdentity identity, uint64_t bytes_max,
            std::chrono::nanoseconds watchdog, base::TrafficCounter& traffic);
  void take_identity(CacheIdentity identity);
  base::Status load(bool whoever);
  base::Status forget_all();
  base::Status read_table(const CacheHeader& header);
  base::Status run(IoOp op, uint64_t offset_bytes, std::span<std::byte> bytes);
  base::Result<Extent> reserve(uint64_t bytes);
  void release(const Extent& extent);
  uint64_t extent_bytes(uint64_t tokens_max) const;
  std::vector<std::byte> encode_table() const;

  std::string directory_;
  FileDescriptor descriptor_;
  std::unique_ptr<TransferQueue> queue_;
  CacheIdentity identity_;
  uint64_t seed_ = 0;  // of the job and the device
  uint64_t bytes_max_ = 0;
  uint64_t size_bytes_ = 0;
  std::map<uint64_t, uint64_t> used_;  // offset -> bytes
  std::map<uint64_t, CachedSequence> sequences_;
  std::array<std::optional<Extent>, 2> tables_;  // of odd and even marks
  uint64_t mark_ = 0;                            // of the last save; 0: none
  base::AlignedBuffer memory_;                   // of transfers of metadata
  base::TrafficCounter& traffic_;                // blocks are counted by who moves them
};

}  // namespace smartinf::storage
