#include "smartinf/csd/gradient_memory.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/update.h"

namespace smartinf::csd {
namespace {

// Vector kernels like it, and two gradients never share a cache line.
constexpr uint64_t kAlignment = 64;

void copy_cast(const std::byte* in, base::DataType in_type, std::byte* out, base::DataType out_type,
               uint64_t count) {
  if (in_type == out_type) {
    std::memcpy(out, in, count * base::data_type_bytes(in_type));
    return;
  }
  const kernels::KernelTable& table = kernels::kernels();
  std::array<float, 4096> wide;
  for (uint64_t done = 0; done < count; done += wide.size()) {
    const uint64_t n = std::min<uint64_t>(wide.size(), count - done);
    table.cast_to_f32(in + done * base::data_type_bytes(in_type), in_type, wide.data(), n);
    table.cast_from_f32(wide.data(), out + done * base::data_type_bytes(out_type), out_type, n);
  }
}

}  // namespace

GradientMemory::GradientMemory(const storage::StoreLayout& layout, base::DataType type,
                               bool checksums)
    : type_(type), checksums_(checksums), entries_(layout.subgroups.size()) {
  for (size_t i = 0; i < entries_.size(); ++i) entries_[i].count = layout.subgroups[i].count;
}

base::Result<std::unique_ptr<GradientMemory>> GradientMemory::create(
    const storage::StoreLayout& layout, base::DataType type, uint64_t budget_bytes, bool checksums,
    uint64_t compressed_block_bytes, std::span<const compress::MatrixLayout> matrices) {
  std::unique_ptr<GradientMemory> made(new GradientMemory(layout, type, checksums));
  const uint64_t element_bytes = base::data_type_bytes(type);
  made->compressed_block_bytes_ = compressed_block_bytes;
  for (size_t i = 0; i < made->entries_.size(); ++i) {
    const storage::StoredSubgroup& subgroup = layout.subgroups[i];
    Entry& entry = made->entries_[i];
    entry.factors = compress::factors_in(matrices, subgroup.first_element, subgroup.count);
    compress::append_factor_runs(matrices, subgroup.first_element, subgroup.count, entry.runs);
  }
  const auto room = [&](const Entry& entry) {
    const uint64_t bytes =
        compressed_block_bytes > 0
            ? sizeof(compress::CompressedHeader) +
                  base::divide_up(entry.count, base::kBlockElements) * compressed_block_bytes +
                  compress::factors_bytes(entry.factors, entry.runs.size())
            : entry.count * element_bytes;
    return base::round_up(bytes, kAlignment);
  };
  // Subgroups of a block, where stages of a pipeline meet, are incomplete until both have computed.
  uint64_t most = 0;
  for (const Entry& entry : made->entries_) most = std::max(most, entry.count);
  uint64_t total = 0;
  bool full = false;
  std::vector<Entry*> in_memory;
  for (Entry& entry : made->entries_) {
    const uint64_t bytes = room(entry);
    full = full || total + bytes > budget_bytes;
    const bool is_cut = entry.count <= base::kBlockElements && entry.count < most;
    if (!full || (is_cut && layout.gradient_spill_bytes != 0)) {
      total += bytes;
      in_memory.push_back(&entry);
      continue;
    }
    if (compressed_block_bytes > 0) {
      return base::Status(
          base::ErrorCode::kOutOfMemory,
          "compressed gradients do not fit their budget of " + base::format_bytes(budget_bytes),
          "Raise the gradient budget or lower the density of the compression.");
    }
    entry.block_checksums.resize(base::divide_up(entry.count, base::kBlockElements));
    made->buffer_bytes_ = std::max(made->buffer_bytes_,
                                   base::round_up(entry.count * element_bytes, base::kIoAlignment));
  }
  if (made->buffer_bytes_ > 0 && layout.gradient_spill_bytes == 0) {
    uint64_t all = 0;
    for (const Entry& entry : made->entries_) all += room(entry);
    return base::Status(base::ErrorCode::kOutOfMemory,
                        "the device's gradients need " + base::format_bytes(all) +
                            " of memory, and their budget is " + base::format_bytes(budget_bytes) +
                            "; it was made without room for those that do not fit",
                        "Allow " + base::format_bytes(all - budget_bytes) +
                            " more (memory.host of smartinf train, or the gradient budget), or "
                            "start a new run.");
  }
  if (made->buffer_bytes_ > 0 && layout.gradient_spill_bytes != element_bytes) {
    return base::Status(base::ErrorCode::kMismatch,
                        "the spill area was made for gradients of " +
                            std::to_string(layout.gradient_spill_bytes) + " bytes, not " +
                            std::to_string(element_bytes),
                        "Use the gradient type of the first run.");
  }
  if (total > 0) {
    SI_ASSIGN_OR_RETURN(made->memory_, base::AlignedBuffer::allocate(total));
    uint64_t offset = 0;
    for (Entry* const entry : in_memory) {
      entry->memory = made->memory_.data() + offset;
      entry->room_bytes = room(*entry);
      offset += entry->room_bytes;
    }
  }
  return made;
}

void GradientMemory::set_scratch(std::vector<std::span<std::byte>> buffers) {
  buffers_ = std::move(buffers);
  for (uint32_t i = 0; i < buffers_.size(); ++i) {
    SI_CHECK(buffers_[i].size() >= buffer_bytes_, "a scratch buffer must hold a gradient");
    free_.push_back(i);
  }
}

base::Status GradientMemory::begin_step() {
  const std::lock_guard lock(mutex_);
  if (being_written_ > 0) {
    return base::Status(base::ErrorCode::kFailedPrecondition,
                        "a step is begun while gradients of the one before are written");
  }
  for (Entry& entry : entries_) {
    entry.received.clear();
    entry.copied = 0;
    entry.buffer = kNone;
  }
  free_.resize(buffers_.size());
  std::iota(free_.begin(), free_.end(), 0u);
  return base::Status();
}

void GradientMemory::reserve_buffers(uint32_t count) {
  const std::lock_guard lock(mutex_);
  std::erase_if(free_, [&](uint32_t buffer) { return buffer < count; });
}

base::Result<GradientMemory::Put> GradientMemory::put(uint32_t subgroup, uint64_t first,
                                                      uint64_t count, base::DataType type,
                                                      const void* gradient,
                                                      std::chrono::nanoseconds wait) {
  Entry& entry = entries_[subgroup];
  if (compressed()) {
    return base::Status(base::ErrorCode::kInvalidArgument,
                        "a gradient that is not compressed, for a device that was opened for such");
  }
  bool open = first <= entry.count && count <= entry.count - first;
  if (open) {
    const std::lock_guard lock(mutex_);
    open = entry.received.add(first, count);
  }
  if (!open) {
    return base::Status(base::ErrorCode::kInvalidArgument,
                        "gradient elements " + std::to_string(first) + " and " +
                            std::to_string(count) + " following are not open in subgroup of " +
                            std::to_string(entry.count),
                        "Each element's gradient goes down once per step.");
  }
  if (count == 0) return Put();
  if (entry.memory == nullptr && entry.buffer == kNone) {
    base::Result<uint32_t> buffer = take_buffer(wait);
    if (!buffer.ok()) {
      // The subgroup's first piece, or it had a buffer.
      const std::lock_guard lock(mutex_);
      entry.received.clear();
      return std::move(buffer).status();
    }
    entry.buffer = *buffer;
  }
  std::byte* base = entry.memory != nullptr ? entry.memory : buffers_[entry.buffer].data();
  copy_cast(static_cast<const std::byte*>(gradient), type,
            base + first * base::data_type_bytes(type_), type_, count);
  // Others may still be copying what was received before this.
  if (entry.copied.fetch_add(count) + count != entry.count) return Put();
  if (entry.memory != nullptr) return Put{true, std::nullopt};

  const uint64_t bytes = entry.count * base::data_type_bytes(type_);
  const uint64_t padded = base::round_up(bytes, base::kIoAlignment);
  std::memset(base + bytes, 0, padded - bytes);
  const uint64_t block_bytes = base::kBlockElements * base::data_type_bytes(type_);
  for (uint64_t block = 0; checksums_ && block < entry.block_checksums.size(); ++block) {
    const uint64_t begin = block * block_bytes;
    entry.block_checksums[block] =
        base::checksum({base + begin, std::min(block_bytes, bytes - begin)}, seed(subgroup, block));
  }
  const Spill spill{subgroup, std::exchange(entry.buffer, kNone), {base, padded}};
  const std::lock_guard lock(mutex_);
  ++being_written_;
  return Put{true, spill};
}

base::Status GradientMemory::put_compressed(uint32_t subgroup, base::SubgroupId id,
                                            std::span<const std::byte> message) {
  Entry& entry = entries_[subgroup];
  SI_ASSIGN_OR_RETURN(const compress::CompressedView view,
                      compress::CompressedView::parse(message));
  if (view.subgroup() != id || view.elements() != entry.count) {
    return base::Status(base::ErrorCode::kInvalidArgument,
                        "a compressed gradient of subgroup " +
                            std::to_string(view.subgroup().value) + " with " +
                            std::to_string(view.elements()) + " elements was put to subgroup " +
                            std::to_string(id.value) + " of " + std::to_string(entry.count));
  }
  bool same_runs = view.runs() == entry.runs.size();
  for (uint64_t run = 0; same_runs && run < view.runs(); ++run) {
    same_runs = view.factors_of(run) == entry.runs[run];
  }
  if (view.factors() != 0 && !same_runs) {
    return base::Status(base::ErrorCode::kInvalidArgument,
                        "a compressed gradient with " + std::to_string(view.factors()) +
                            " row and column factors of its second moment in " +
                            std::to_string(view.runs()) + " runs, where the parameters have " +
                            std::to_string(entry.factors) + " rows and columns in " +
                            std::to_string(entry.runs.size()) + " others");
  }
  const bool there = entry.copied > 0;
  if (there || message.size() > entry.room_bytes) {
    return base::Status(base::ErrorCode::kInvalidArgument,
                        "a compressed gradient of " + std::to_string(message.size()) +
                            " bytes where " + std::to_string(there ? 0 : entry.room_bytes) +
                            " may come",
                        "Each subgroup's gradient goes down once per step.");
  }
  std::memcpy(entry.memory, message.data(), message.size());
  entry.message_bytes = message.size();
  entry.copied = entry.count;
  return base::Status();
}

base::Result<uint32_t> GradientMemory::take_buffer(std::chrono::nanoseconds wait) {
  std::unique_lock lock(mutex_);
  const bool woken = freed_.wait_for(
      lock, wait, [&] { return !free_.empty() || being_written_ == 0 || !failure_.ok(); });
  if (!failure_.ok()) return failure_;
  if (!woken) {
    return base::Status(base::ErrorCode::kTimeout, "no spilled gradient was written in time",
                        "The drive may be failing; see the system's log.");
  }
  if (free_.empty()) {
    return base::Status(base::ErrorCode::kOutOfMemory,
                        "gradients of " + std::to_string(buffers_.size()) +
                            " subgroups are incomplete at once, and no buffer is left for another",
                        "Raise the memory budget or the gradient budget.");
  }
  const uint32_t buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void GradientMemory::written(const Spill& spill) {
  const std::lock_guard lock(mutex_);
  free_.push_back(spill.buffer);
  --being_written_;
  freed_.notify_all();
}

void GradientMemory::fail(base::Status status) {
  const std::lock_guard lock(mutex_);
  failure_ = std::move(status);
  freed_.notify_all();
}

std::optional<storage::BlockSum> GradientMemory::expected_sum(uint32_t subgroup,
                                                              uint64_t block) const {
  if (!checksums_) return std::nullopt;
  return storage::BlockSum{seed(subgroup, block), entries_[subgroup].block_checksums[block]};
}

bool GradientMemory::verify_block(uint32_t subgroup, uint64_t block,
                                  std::span<const std::byte> bytes) const {
  const std::optional<storage::BlockSum> expected = expected_sum(subgroup, block);
  return !expected || base::checksum(bytes, expected->seed) == expected->checksum;
}

uint64_t GradientMemory::seed(uint32_t subgroup, uint64_t block) const {
  return base::mix_seed(subgroup, block);
}

}  // namespace smartinf::csd
