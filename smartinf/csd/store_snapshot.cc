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
#include "smartinf/storage/row_commit.h"

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
  StoreSnapshot(std::unique_ptr<storage::StateReader> reader, std::string name,
                OpenTablesToRead open_tables)
      : reader_(std::move(reader)), name_(std::move(name)), open_tables_(std::move(open_tables)) {}

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
  Result<RowSnapshot*> tables() override {
    const std::string record = storage::split_row_commit(client_metadata()).record;
    if (tables_ == nullptr && !record.empty() && open_tables_) {
      auto opened = open_tables_(layout().run, record);
      if (!opened.ok()) return std::move(opened).status().with_context("device " + name_);
      tables_ = std::move(*opened);
    }
    return tables_.get();
  }
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
    if (!cloned) return uint64_t{0};
    const uint64_t bytes = reader_->geometry().container_bytes();
    SI_ASSIGN_OR_RETURN(RowSnapshot* const rows, tables());
    if (rows == nullptr) return bytes;
    SI_ASSIGN_OR_RETURN(const uint64_t more, rows->clone_to(directory));
    if (more > 0) return bytes + more;
    if (::unlink(to.c_str()) != 0) return base::errno_status(errno, "cannot delete", to);
    return uint64_t{0};
  }

 private:
  std::unique_ptr<storage::StateReader> reader_;
  std::string name_;
  OpenTablesToRead open_tables_;
  std::unique_ptr<RowSnapshot> tables_;
};

class StoredTables final : public RowSnapshot {
 public:
  Status open(const std::string& directory, const storage::RunId& run, const std::string& record) {
    SI_ASSIGN_OR_RETURN(file_, storage::open_rows_to_read(directory, run, record, traffic_));
    return Status();
  }
  const storage::RowFileLayout& layout() const override { return file_->layout(); }
  Status read(uint32_t table, std::span<const uint32_t> rows, const Visit& visit) override {
    return file_->read(table, rows, visit);
  }
  Result<uint64_t> clone_to(const std::string& directory) override {
    return clone_rows(file_->path(), directory);
  }

 private:
  base::TrafficCounter traffic_;
  std::unique_ptr<storage::RowFile> file_;
};

}  // namespace

std::unique_ptr<Snapshot> make_snapshot(std::unique_ptr<storage::StateReader> reader,
                                        std::string name, OpenTablesToRead tables) {
  return std::make_unique<StoreSnapshot>(std::move(reader), std::move(name), std::move(tables));
}

Result<std::unique_ptr<RowSnapshot>> open_stored_tables(const std::string& directory,
                                                        const storage::RunId& run,
                                                        const std::string& record) {
  auto tables = std::make_unique<StoredTables>();
  SI_RETURN_IF_ERROR(tables->open(directory, run, record));
  return std::unique_ptr<RowSnapshot>(std::move(tables));
}

Result<uint64_t> clone_rows(const std::string& file, const std::string& directory) {
  const storage::FileDescriptor from(::open(file.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  struct stat info {};
  if (!from.is_open() || ::fstat(from.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    return uint64_t{0};
  }
  const std::string to = (std::filesystem::path(directory) / storage::kRowFileName).string();
  SI_ASSIGN_OR_RETURN(const bool cloned, clone_file(from.get(), to));
  return cloned ? static_cast<uint64_t>(info.st_size) : 0;
}

StoreNewState::StoreNewState(std::unique_ptr<storage::Store> store, std::string directory)
    : store_(std::move(store)), directory_(std::move(directory)) {
  store_->begin_step(store_->layout().copied_step);
}

StoreNewState::~StoreNewState() { (void)close(); }

Status StoreNewState::create_tables(storage::RowFileLayout layout, bool sparse) {
  if (directory_.empty()) return NewState::create_tables(std::move(layout), sparse);
  const storage::StoreOptions options;
  SI_RETURN_IF_ERROR(storage::RowFile::check(layout));
  SI_ASSIGN_OR_RETURN(auto place, storage::open_cache_place(
                                      directory_, storage::kRowFileName,
                                      sparse ? 1 : storage::RowFile::file_bytes(layout), options));
  SI_ASSIGN_OR_RETURN(rows_, storage::RowFile::create(std::move(place), std::move(layout),
                                                      options.watchdog, rows_traffic_, sparse));
  rows_->begin_step(store_->layout().copied_step);
  has_tables_ = true;
  return Status();
}

Status StoreNewState::put_rows(uint32_t table, std::span<const uint32_t> rows,
                               std::span<const std::byte> records) {
  SI_CHECK(rows_ != nullptr, "rows of a state without tables");
  return rows_->put(table, rows, records);
}

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
  const base::StepNumber step = store_->layout().copied_step;
  std::string record;
  if (rows_ != nullptr) {
    SI_ASSIGN_OR_RETURN(record, rows_->prepare(step));
  }
  return store_->prepare(step, storage::join_row_commit(client_metadata, record));
}

Status StoreNewState::commit() { return store_->commit(store_->layout().copied_step); }

Status StoreNewState::close() {
  if (store_ == nullptr) return closed_;
  closed_ = rows_ != nullptr ? rows_->close() : Status();
  rows_.reset();
  if (Status store = store_->close(); !store.ok()) closed_ = std::move(store);
  if (!closed_.ok()) storage::leak_in_flight(std::move(store_));
  store_.reset();
  return closed_;
}

}  // namespace smartinf::csd
