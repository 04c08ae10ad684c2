#include "smartinf/storage/state_reader.h"

#include <cstring>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>

#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/read_only.h"

namespace smartinf::storage {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

constexpr std::string_view kRestore =
    "Run smartinf fsck to see what else is damaged; restore a checkpoint.";

}  // namespace

Result<std::unique_ptr<StateReader>> StateReader::open(const std::string& path, ReaderLock lock) {
  SI_ASSIGN_OR_RETURN(ReadOnlyContainer container, open_container_to_read(path));
  ContainerLock taken;
  if (lock == ReaderLock::kTake) {
    SI_ASSIGN_OR_RETURN(taken, lock_container(path));
  }
  return open(std::move(container), path, std::move(taken));
}

Result<std::unique_ptr<StateReader>> StateReader::open(ReadOnlyContainer container,
                                                       const std::string& path,
                                                       ContainerLock lock) {
  std::unique_ptr<StateReader> reader(new StateReader);
  reader->path_ = path;
  reader->container_ = std::move(container);
  reader->lock_ = std::move(lock);
  SI_ASSIGN_OR_RETURN(const FoundSuperblock found, read_superblock(reader->container_));
  reader->superblock_ = found.superblock;
  reader->state_ = state_of(found.superblock);
  if (reader->state_.torn) {
    return Status(ErrorCode::kFailedPrecondition, std::string(kTornState), "Restore a checkpoint.",
                  base::ErrorPlace{path, {}, {}, 0});
  }
  if (!reader->state_.initialized) {
    const Status why = interrupted_creation(reader->state_);
    return Status(why.code(), why.what(), why.advice(), base::ErrorPlace{path, {}, {}, 0});
  }
  const auto corrupt = [&](std::string what) {
    return Status(ErrorCode::kCorrupt, std::move(what), std::string(kRestore),
                  base::ErrorPlace{reader->container_.file_path, {}, {}, 0});
  };
  if (found.superblock.container_bytes > reader->container_.size_bytes) {
    return corrupt(fmt::format("the container has {} bytes instead of {}",
                               reader->container_.size_bytes, found.superblock.container_bytes));
  }
  SI_ASSIGN_OR_RETURN(reader->layout_, read_layout(reader->container_, found.superblock));
  auto geometry = Geometry::make(reader->layout_, found.superblock.slots);
  if (!geometry.ok() || geometry->container_bytes() != found.superblock.container_bytes) {
    return corrupt("the layout record contradicts the superblock");
  }
  reader->geometry_ = std::move(*geometry);
  return reader;
}

Status StateReader::choose_step(base::StepNumber step) {
  const bool prepared = step == superblock_.prepared_step;
  if (!prepared && step != superblock_.committed_step) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("the device holds steps {} and {}, not {}",
                              superblock_.committed_step, superblock_.prepared_step, step),
                  {}, base::ErrorPlace{container_.file_path, {}, {}, 0});
  }
  const uint64_t bytes =
      prepared ? superblock_.prepared_table_bytes : superblock_.committed_table_bytes;
  const uint64_t checksum =
      prepared ? superblock_.prepared_table_checksum : superblock_.committed_table_checksum;
  Status last(ErrorCode::kCorrupt, "the superblock gives the table an impossible length");
  if (bytes >= geometry_.table_records_bytes() && bytes <= geometry_.table_bytes_max()) {
    table_.resize(bytes);
    for (uint32_t copy = 0; copy < kTableCopies; ++copy) {
      const Result<size_t> got =
          read_at(container_, geometry_.table_offset(step, copy), std::span<std::byte>(table_));
      last = got.ok() ? check_table(std::span<const std::byte>(table_).first(*got), geometry_,
                                    table_seed(layout_.run, layout_.device_index, step), step)
                      : got.status();
      TableHeader header{};
      if (last.ok()) std::memcpy(&header, table_.data(), sizeof(header));
      if (last.ok() && header.checksum == checksum) {
        step_ = step;
        return Status();
      }
      if (last.ok()) last = Status(ErrorCode::kCorrupt, "the table belongs to another attempt");
      base::log(base::LogLevel::kWarning,
                fmt::format("{}: copy {} of the table of step {} cannot be used: {}",
                            container_.file_path, copy, step, last.what()));
    }
  }
  return Status(last.code(),
                fmt::format("no copy of the table of step {} can be used: {}", step, last.what()),
                std::string(kRestore),
                base::ErrorPlace{container_.file_path, geometry_.table_offset(step, 0), bytes, 0});
}

std::string StateReader::client_metadata() const {
  SI_CHECK(!table_.empty(), "a step is chosen first");
  return std::string(reinterpret_cast<const char*>(table_.data()) + geometry_.table_records_bytes(),
                     table_.size() - geometry_.table_records_bytes());
}

Status StateReader::read_blocks(size_t subgroup, size_t plane, uint64_t first, uint64_t count,
                                std::span<std::byte> out) {
  SI_CHECK(!table_.empty(), "a step is chosen first");
  const std::byte* entry = table_.data() + geometry_.record_offset(subgroup, plane);
  PlaneRecord record;
  std::memcpy(&record, entry, sizeof(record));
  const uint64_t begin = geometry_.extent_offset(subgroup, record.slot) +
                         geometry_.plane_offset(subgroup, plane) +
                         geometry_.block_offset(plane, first);
  SI_ASSIGN_OR_RETURN(const size_t got, read_at(container_, begin, out));
  if (got < out.size()) {
    return Status(ErrorCode::kCorrupt, "the container is cut short", std::string(kRestore),
                  base::ErrorPlace{container_.file_path, begin, out.size(), 0});
  }
  if ((record.flags & kPlaneSealed) == 0) {
    blocks_without_checksum_ += count;
    return Status();
  }
  const uint64_t seed = device_seed(layout_.run, layout_.device_index);
  const base::SubgroupId id = layout_.subgroups[subgroup].id;
  uint64_t offset = 0;
  for (uint64_t block = first; block < first + count; ++block) {
    const uint64_t length = geometry_.block_bytes(subgroup, plane, block);
    SI_CHECK(offset + length <= out.size(), "a buffer of another size than its blocks");
    uint64_t wanted = 0;
    std::memcpy(&wanted, entry + sizeof(record) + 8 * block, sizeof(wanted));
    const BlockIdentity identity{id.value, static_cast<uint32_t>(plane), block, record.slot,
                                 record.step};
    if (block_checksum(out.subspan(offset, length), seed, identity) != wanted) {
      return Status(
          ErrorCode::kCorrupt,
          fmt::format("block {} of the {} plane of subgroup {} has a wrong checksum for step {}",
                      block, base::plane_kind_name(layout_.planes[plane]), id.value, record.step),
          std::string(kRestore), base::ErrorPlace{container_.file_path, begin + offset, length, 0});
    }
    offset += length;
  }
  SI_CHECK(offset == out.size(), "a buffer of another size than its blocks");
  return Status();
}

}  // namespace smartinf::storage
