#include "smartinf/csd/store_snapshot.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <utility>

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/storage/container.h"
#include "smartinf/storage/file_descriptor.h"
#include "smartinf/storage/leak_in_flight.h"

namespace smartinf::csd {

using base::Result;
using base::Status;

namespace {

/// How long one look at the store waits; a hanging request is its watchdog's matter.
constexpr std::chrono::milliseconds kWait{100};

/// Lets `to` share the blocks of an open file. False: this file system cannot, or not between these
/// two.
Result<bool> clone_file(int from, const std::string& to) {
  const storage::FileDescriptor made(
      ::open(to.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!made.is_open()) return base::errno_status(errno, "cannot make the checkpoint's file", to);
  // btrfs shares blocks only between files that agree on copy-on-write, which stores have off.
  int flags = 0;
  if (::ioctl(from, FS_IOC_GETFLAGS, &flags) == 0 && (flags & FS_NOCOW_FL) != 0) {
    int own = 0;
    if (::ioctl(made.get(), FS_IOC_GETFLAGS, &own) == 0) {
      own |= FS_NOCOW_FL;
      (void)::ioctl(made.get(), FS_IOC_SETFLAGS, &own);  // if it fails, so does the next
    }
  }
  if (::ioctl(made.get(), FICLONE, from) == 0) return true;
  const int why = errno;
  if (why == ENOSPC || why == EDQUOT || why == EIO) {
    return base::errno_status(why, "cannot clone the state", to);
  }
  if (::unlink(to.c_str()) != 0) return base::errno_status(errno, "cannot delete", to);
  return false;
}

class StoreSnapshot final : public Snapshot {
 public:
  StoreSnapshot(std::unique_ptr<storage::StateReader> reader, std::string name)
      : reader_(std::move(reader)), name_(std::move(name)) {}

  const std::string& name() const override { return name_; }
  const storage::StoreState& state() const override { return reader_->state(); }
  const storage::StoreLayout& layout() const override { return reader_->layout(); }
  std::string drive() const override {
    struct stat info {};
    if (reader_->descriptor() < 0 || ::fstat(reader_->descriptor(), &info) != 0) return {};
    return std::to_string(S_ISBLK(info.st_mode) ? info.st_rdev : info.st_dev);
  }

  Status choose_step(base::StepNumber step) override { return reader_->choose_step(step); }
  std::string client_metadata() const override { return reader_->client_metadata(); }
  Status read_blocks(size_t subgroup, size_t plane, uint64_t first, uint64_t count,
                     std::span<std::byte> out) override {
    return reader_->read_blocks(subgroup, plane, first, count, out);
  }
  uint64_t blocks_without_checksum() const override { return reader_->blocks_without_checksum(); }

  Result<uint64_t> clone_to(const std::string& directory) override {
    struct stat info {};
    const int from = reader_->descriptor();
    if (from < 0 || ::fstat(from, &info) != 0 || !S_ISREG(info.st_mode)) return uint64_t{0};
    const std::string to = (std::filesystem::path(directory) / storage::kStateFileName).string();
    SI_ASSIGN_OR_RETURN(const bool cloned, clone_file(from, to));
    return cloned ? reader_->geometry().container_bytes() : 0;
  }

 private:
  std::unique_ptr<storage::StateReader> reader_;
  std::string name_;
};

}  // namespace

std::unique_ptr<Snapshot> make_snapshot(std::unique_ptr<storage::StateReader> reader,
                                        std::string name) {
  return std::make_unique<StoreSnapshot>(std::move(reader), std::move(name));
}

StoreNewState::StoreNewState(std::unique_ptr<storage::Store> store) : store_(std::move(store)) {
  store_->begin_step(store_->layout().copied_step);
}

StoreNewState::~StoreNewState() { (void)close(); }

void StoreNewState::start(SubgroupWrite& write) {
  const storage::StoreLayout& layout = store_->layout();
  const base::SubgroupId id = layout.subgroups[write.subgroup].id;
  for (size_t plane = 0; plane < layout.planes.size(); ++plane) {
    const auto bytes =
        write.memory.subspan(store_->plane_offset(id, plane), store_->plane_bytes(id, plane));
    const uint64_t stride = base::encoded_bytes(
        base::plane_encoding(layout.format, layout.planes[plane]), base::kBlockElements);
    for (uint64_t block = 0; block * stride < bytes.size(); ++block) {
      store_->seal_block(
          id, plane, block,
          bytes.subspan(block * stride, std::min<uint64_t>(stride, bytes.size() - block * stride)));
    }
  }
  write.io = storage::SubgroupIo{};
  write.io.op = storage::SubgroupIo::Op::kWrite;
  write.io.subgroup = id;
  write.io.buffer = write.memory;
  write.io.owner = &write;
  write.under_way = true;
  store_->start(write.io);
}

Status StoreNewState::wait(SubgroupWrite& write) {
  while (write.under_way) {
    std::array<storage::SubgroupIo*, 4> done{};
    SI_ASSIGN_OR_RETURN(const size_t count, store_->poll(done, kWait));
    for (size_t i = 0; i < count; ++i) {
      static_cast<SubgroupWrite*>(done[i]->owner)->under_way = false;
    }
  }
  return write.io.status;
}

Status StoreNewState::prepare(const std::string& client_metadata) {
  return store_->prepare(store_->layout().copied_step, client_metadata);
}

Status StoreNewState::commit() { return store_->commit(store_->layout().copied_step); }

Status StoreNewState::close() {
  if (store_ == nullptr) return closed_;
  closed_ = store_->close();
  if (!closed_.ok()) storage::leak_in_flight(std::move(store_));
  store_.reset();
  return closed_;
}

}  // namespace smartinf::csd
