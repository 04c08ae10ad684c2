#include "smartinf/storage/superblock_pairs.h"

#include <array>
#include <cstring>

#include <fmt/format.h>

namespace smartinf::storage {

using base::ErrorCode;
using base::Result;
using base::Status;

Status SuperblockPairs::allocate() {
  SI_ASSIGN_OR_RETURN(images_, base::AlignedBuffer::allocate(kSuperblockCopies * kSuperblockBytes));
  return Status();
}

void SuperblockPairs::set_found(const Superblock& found) {
  value_ = found;
  written_before_ = found.bytes_written_ever;
}

Status SuperblockPairs::write(bool durably) {
  // Never the pair that holds the last one known to be on the medium.
  const uint32_t pair = 1 - durable_pair_;
  ++value_.sequence;
  value_.bytes_written_ever = bytes_written_ever();
  std::array<Transfer, kSuperblockCopies / kSuperblockPairs> copies;
  for (uint32_t i = 0; i < copies.size(); ++i) {
    value_.copy = pair + i * kSuperblockPairs;
    seal_superblock(value_);
    const std::span<std::byte> image =
        images_.bytes().subspan(value_.copy * kSuperblockBytes, kSuperblockBytes);
    std::memcpy(image.data(), &value_, sizeof(value_));
    copies[i] = metadata_transfer(durably ? IoOp::kWriteDurable : IoOp::kWrite,
                                  superblock_offset(value_.copy), image);
  }
  SI_RETURN_IF_ERROR(pump_.write_metadata(copies));
  written_pair_ = pair;
  // Without durability nothing is synced: at least the pairs take turns.
  if (durably || !durable_) durable_pair_ = pair;
  return Status();
}

Status SuperblockPairs::check_newest() {
  std::array<Transfer, kSuperblockCopies> reads;
  const std::span<std::byte> images = images_.bytes();
  for (uint32_t copy = 0; copy < kSuperblockCopies; ++copy) {
    reads[copy] = metadata_transfer(IoOp::kRead, superblock_offset(copy),
                                    images.subspan(copy * kSuperblockBytes, kSuperblockBytes));
  }
  // A copy that cannot be read leaves what was written there last, which is not newer.
  if (!pump_.read_metadata(reads).ok() && !pump_.failure().ok()) return pump_.failure();
  for (uint32_t copy = 0; copy < kSuperblockCopies; ++copy) {
    pump_.count_metadata_read(kSuperblockBytes);
    const Result<Superblock> found =
        parse_superblock(images.subspan(copy * kSuperblockBytes, kSuperblockBytes), copy);
    if (!found.ok() || found->sequence <= value_.sequence) continue;
    return Status(ErrorCode::kBusy,
                  fmt::format("another process has written to the device since it was opened: its "
                              "state is at step {}",
                              found->committed_step),
                  "Stop all but one of the processes that use this device. Nothing that they wrote "
                  "was overwritten.",
                  base::ErrorPlace{file_path_, superblock_offset(copy), kSuperblockBytes, 0});
  }
  return Status();
}

Status SuperblockPairs::sync() {
  const std::array<Transfer, 1> sync{metadata_transfer(IoOp::kSync, 0, {})};
  const Status synced = pump_.write_metadata(sync);
  // The last superblock that was written whole is on the medium now, however it was written. After
  // a failure it may be nowhere, and a later sync would not say so.
  if (synced.ok()) {
    durable_pair_ = written_pair_;
  } else {
    written_pair_ = durable_pair_;
  }
  return synced;
}

uint64_t SuperblockPairs::bytes_written_ever() const {
  return written_before_ + pump_.traffic().down_total();
}

}  // namespace smartinf::storage
