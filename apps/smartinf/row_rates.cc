#include "apps/smartinf/row_rates.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <fcntl.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/row_map.h"
#include "smartinf/base/row_pages.h"
#include "smartinf/csd/messages/rows/row_cache.h"
#include "smartinf/kernels/update.h"
#include "smartinf/plan/row_schedule.h"
#include "smartinf/sim/row_ids.h"

#include "apps/smartinf/median.h"

namespace smartinf::apps {

namespace {

/// The i-th of `count` of so many pages at random that ascend, as a step reads and a merge writes
/// them.
uint64_t ascending_page(uint64_t i, uint64_t count, uint64_t pages, std::mt19937_64& random) {
  const uint64_t first = i * pages / count;
  return first + random() % std::max<uint64_t>(1, (i + 1) * pages / count - first);
}

}  // namespace

PagesAlone::~PagesAlone() {
  std::error_code error;
  std::filesystem::remove(written_, error);
}

base::Status PagesAlone::open(const std::string& read_path, const std::string& written_path,
                              uint64_t page_bytes, uint64_t pages) {
  page_bytes_ = page_bytes;
  pages_ = pages;
  path_ = read_path;
  written_ = written_path;
  file_ = storage::FileDescriptor(::open(path_.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
  if (!file_.is_open()) return base::errno_status(errno, "cannot read", path_);
  log_ = storage::FileDescriptor(
      ::open(written_.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0666));
  if (!log_.is_open()) return base::errno_status(errno, "cannot write", written_);
  std::error_code error;
  first_page_ = std::filesystem::file_size(path_, error) / page_bytes - pages;
  SI_ASSIGN_OR_RETURN(ring_, storage::make_ring({.depth = kReads}));
  SI_ASSIGN_OR_RETURN(read_file_, ring_->add_file(file_.get(), path_));
  SI_ASSIGN_OR_RETURN(write_file_, ring_->add_file(log_.get(), written_));
  SI_ASSIGN_OR_RETURN(
      memory_, base::AlignedBuffer::allocate(std::max(kReads * page_bytes, kWrites * kWriteBytes)));
  (void)ring_->register_memory(memory_.bytes());
  return {};
}

base::Status PagesAlone::read(uint64_t pages) {
  return move(storage::IoOp::kRead, read_file_, kReads, page_bytes_, pages, [&](uint64_t i) {
    return (first_page_ + ascending_page(i, pages, pages_, random_)) * page_bytes_;
  });
}
base::Status PagesAlone::write(uint64_t bytes) {
  SI_RETURN_IF_ERROR(move(storage::IoOp::kWrite, write_file_, kWrites, kWriteBytes,
                          base::divide_up(bytes, kWriteBytes),
                          [](uint64_t i) { return i * kWriteBytes; }));
  return sync();
}
base::Status PagesAlone::write_pages(uint64_t pages, uint64_t written_bytes) {
  const uint64_t written = written_bytes / page_bytes_;
  SI_RETURN_IF_ERROR(
      move(storage::IoOp::kWrite, write_file_, kReads, page_bytes_, pages,
           [&](uint64_t i) { return ascending_page(i, pages, written, random_) * page_bytes_; }));
  return sync();
}
base::Status PagesAlone::sync() {
  return move(storage::IoOp::kSync, write_file_, 1, 0, 1, [](uint64_t) { return 0; });
}

base::Status PagesAlone::move(storage::IoOp op, uint32_t file, uint32_t depth, uint64_t bytes,
                              uint64_t count, const std::function<uint64_t(uint64_t)>& offset_of) {
  uint64_t begun = 0;
  uint32_t in_flight = 0;
  const auto start = [&](storage::IoRequest& request) -> base::Status {
    request.offset_bytes = offset_of(begun++);
    storage::IoRequest* const one = &request;
    ++in_flight;
    return ring_->submit({&one, 1});
  };
  for (uint32_t i = 0; i < depth && begun < count; ++i) {
    requests_[i] = {};
    requests_[i].op = op;
    requests_[i].file = file;
    requests_[i].buffer = memory_.bytes().subspan(i * bytes, bytes);
    SI_RETURN_IF_ERROR(start(requests_[i]));
  }
  while (in_flight > 0) {
    std::array<storage::IoRequest*, kReads> done{};
    SI_ASSIGN_OR_RETURN(const size_t reaped, ring_->reap(done, std::chrono::seconds(1)));
    for (size_t i = 0; i < reaped; ++i) {
      --in_flight;
      if (done[i]->outcome < 0) {
        return base::errno_status(static_cast<int>(-done[i]->outcome), "a transfer failed", path_);
      }
      if (begun < count) SI_RETURN_IF_ERROR(start(*done[i]));
    }
  }
  return {};
}

/// Rows lie in memory as chance has it, as in a cache that has been in use.
void time_rows(const RowWork& work, sim::Machine& machine) {
  using plan::RowUse;
  constexpr uint64_t kPagesBytes = 64 * base::kMiB;
  const uint64_t record_bytes = kernels::record_bytes(work.rule, work.dim);
  const uint64_t page_bytes = base::page_bytes(record_bytes);
  csd::RowCache cache(static_cast<uint32_t>(record_bytes),
                      std::min<uint64_t>(work.memory_bytes, 256 * base::kMiB));
  const uint64_t rows = std::min(cache.capacity(), work.rows);
  std::vector<uint32_t> shuffled(rows);
  std::iota(shuffled.begin(), shuffled.end(), 0u);
  std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937_64(3));
  base::RowMap index(2 * rows);
  const std::vector<std::byte> pages(kPagesBytes / page_bytes * page_bytes, std::byte{1});
  std::mt19937_64 random(4);
  const uint64_t count = std::min(work.batch, rows / 4);
  sim::RowIds numbers(rows, 0, true);
  const auto placement = plan::RowPlacement::make(rows, {0}, base::records_per_page(record_bytes));
  const uint32_t dim = work.dim;
  const size_t row_bytes = dim * base::data_type_bytes(work.gradient_type);
  const kernels::KernelTable& kernels = kernels::kernels();
  std::vector<std::byte> out(count * row_bytes);
  uint64_t seal = 0;
  std::vector<float> sums(count * dim), gradient(dim);
  kernels::RowOptions rule;
  rule.rule = work.rule;
  const kernels::RowScalars scalars = kernels::make_row_scalars(rule, 1e-3, 1, 1);
  std::vector<double> host_s, row_s, page_s, update_s;
  for (int pass = 0; pass < 3; ++pass) {
    cache.clear();
    for (const uint32_t row : shuffled) (void)cache.insert(row, RowUse::kLookup);
    const std::vector<int64_t> ids = numbers.next(count);
    uint64_t begin_ns = base::now_ns();
    const auto lap = [&](std::vector<double>& times) {
      times.push_back(base::seconds_since(begin_ns) / static_cast<double>(count));
      begin_ns = base::now_ns();
    };
    // Rows up, then their gradients (engine::RowTables).
    const plan::RowBatch batch = plan::RowBatch::make(*placement, ids);
    std::vector<std::byte> up(out);
    for (size_t i = 0; i < count; ++i) {
      std::memcpy(up.data() + i * row_bytes, out.data() + batch.place[i] * row_bytes, row_bytes);
    }
    base::RowMap places;
    std::vector<uint32_t> place(count), order(count);
    for (size_t i = 0; i < count; ++i) {
      const uint32_t row = placement->local_row(static_cast<uint64_t>(ids[i]));
      if (places.find(row) == base::RowMap::kNone) places.set(row, static_cast<uint32_t>(i));
      place[i] = order[i] = static_cast<uint32_t>(i);
    }
    const std::vector<float> added(sums);
    kernels::add_rows(base::DataType::kF32, added.data(), place, dim, sums);
    std::ranges::sort(order, {}, [&](uint32_t i) { return ids[i]; });
    for (size_t i = 0; i < count; ++i) {
      (void)placement->device_of(static_cast<uint64_t>(ids[order[i]]));
      std::byte* const at = out.data() + i * row_bytes;
      kernels.cast_from_f32(sums.data() + order[i] * dim, at, work.gradient_type, dim);
      (void)kernels.partial_norm(at, work.gradient_type, dim);
    }
    lap(host_s);
    for (size_t i = 0; i < count; ++i) {
      kernels::read_weights(cache.find(batch.rows[0][i], RowUse::kOfStep), dim, work.gradient_type,
                            out.data() + i * row_bytes);
    }
    lap(row_s);
    std::vector<std::byte> records(count * record_bytes), log(records);
    std::vector<std::pair<uint32_t, uint32_t>> undo;
    for (size_t i = 0; i < count; ++i) {
      const std::span<std::byte> record =
          std::span(records).subspan(i * record_bytes, record_bytes);
      std::ranges::copy(cache.find(batch.rows[0][i], RowUse::kBeside), record.begin());
      kernels.cast_to_f32(out.data() + i * row_bytes, work.gradient_type, gradient.data(), dim);
      kernels::update_record(scalars, gradient, record);
      undo.emplace_back(batch.rows[0][i], index.find(batch.rows[0][i]));
      index.set(batch.rows[0][i], static_cast<uint32_t>(i));
      // As into a page of the log, which is sealed, and into the cache.
      std::ranges::copy(record, log.begin() + static_cast<ptrdiff_t>(i * record_bytes));
      seal = base::checksum(record, seal);
      std::ranges::copy(record, cache.find(batch.rows[0][i], RowUse::kBeside).begin());
      cache.release(batch.rows[0][i]);
    }
    lap(update_s);
    for (size_t i = 0; i < count; ++i) {
      const uint64_t at = random() % (pages.size() / page_bytes) * page_bytes;
      seal = base::checksum(std::span(pages).subspan(at, page_bytes), seal);
      const auto row = static_cast<uint32_t>(rows + (pass * count + i) % rows);
      if (index.find(row) != base::RowMap::kNone || !cache.find(row, RowUse::kLookup).empty())
        continue;
      const std::span<std::byte> record = cache.insert(row, RowUse::kOfStep);
      std::ranges::copy(std::span(pages).subspan(at, record_bytes), record.begin());
      kernels::read_weights(record, dim, work.gradient_type, out.data() + i * row_bytes);
    }
    lap(page_s);
  }
  machine.host.row_s = median(host_s);
  for (sim::DeviceGroup& device : machine.devices) {
    device.page_s = median(page_s);
    device.row_s = median(row_s);
    device.row_bytes_per_s =
        static_cast<double>(record_bytes) / std::max(1e-9, median(update_s) - median(row_s));
  }
}

base::Status measure_pages(const std::string& directory, sim::DeviceGroup& device) {
  constexpr uint64_t kBytes = 256 * base::kMiB;
  constexpr uint64_t kPages = 16384;
  const std::string path = (std::filesystem::path(directory) / "smartinf.pages").string();
  PagesAlone alone;
  if (!std::ofstream(path)) return base::errno_status(errno, "cannot make a file", path);
  std::error_code error;
  std::filesystem::resize_file(path, kBytes, error);
  SI_RETURN_IF_ERROR(alone.open(path, path, base::kPageBytes, kBytes / base::kPageBytes));
  SI_RETURN_IF_ERROR(alone.write(kBytes));
  uint64_t begin_ns = base::now_ns();
  SI_RETURN_IF_ERROR(alone.read(kPages));
  device.page_reads_per_s = kPages / base::seconds_since(begin_ns);
  std::vector<double> syncs_s;
  for (int i = 0; i < 5; ++i) {
    begin_ns = base::now_ns();
    SI_RETURN_IF_ERROR(alone.write_pages(1, kBytes));
    syncs_s.push_back(base::seconds_since(begin_ns));
  }
  device.sync_s = median(syncs_s);
  begin_ns = base::now_ns();
  SI_RETURN_IF_ERROR(alone.write_pages(kPages, kBytes));
  device.page_writes_per_s = kPages / base::seconds_since(begin_ns);
  return {};
}

}  // namespace smartinf::apps
