// Metadata that nobody wrote by accident, its checksums right: everything that looks at a device
// (inspect, fsck, the start of a run) answers with a value or a typed error, in bounded memory.
// Input: one byte of choices, the superblock's first 176 bytes, then the layout record with the
// run's description at its end.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "smartinf/base/check.h"
#include "smartinf/base/checksum.h"
#include "smartinf/engine/run_description.h"
#include "smartinf/storage/check_store.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/store.h"
#include "smartinf/storage/summary.h"

namespace {

using namespace smartinf::storage;

constexpr size_t kSuperblockGiven = offsetof(Superblock, reserved);
constexpr size_t kLayoutGivenMax = size_t{1} << 20;
/// More than metadata needs; state that a superblock claims beyond it is a hole in the file.
constexpr uint64_t kContainerBytesMax = uint64_t{4} << 20;

/// A folder in memory for as long as the process runs, with the container's file in it.
class Device {
 public:
  Device() {
    std::string path = std::filesystem::exists("/dev/shm") ? "/dev/shm/container_fuzz_XXXXXX"
                                                           : "/tmp/container_fuzz_XXXXXX";
    SI_CHECK(::mkdtemp(path.data()) != nullptr, "no folder for the container");
    path_ = path;
  }
  ~Device() { std::filesystem::remove_all(path_); }

  const std::string& path() const { return path_; }
  void write(const std::vector<std::byte>& bytes, uint64_t container_bytes) const {
    const std::string file = path_ + "/smartinf.state";
    std::FILE* out = std::fopen(file.c_str(), "wb");
    SI_CHECK(out != nullptr, "no container");
    SI_CHECK(std::fwrite(bytes.data(), 1, bytes.size(), out) == bytes.size(), "no room");
    std::fclose(out);
    std::filesystem::resize_file(
        file, std::max<uint64_t>(bytes.size(), std::min(container_bytes, kContainerBytesMax)));
  }

 private:
  std::string path_;
};

void seal_layout(std::span<std::byte> record, Superblock& superblock) {
  const uint64_t bytes = record.size();
  std::memcpy(record.data(), &kLayoutMagic, 8);
  std::memcpy(record.data() + offsetof(LayoutHeader, bytes), &bytes, 8);
  superblock.layout_bytes = bytes;
  superblock.layout_checksum = smartinf::base::checksum(record.subspan(16), kLayoutMagic);
  std::memcpy(record.data() + offsetof(LayoutHeader, checksum), &superblock.layout_checksum, 8);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Device device;
  if (size <= 1 + kSuperblockGiven || size > kLayoutGivenMax) return 0;
  const bool honest = (data[0] & 1u) != 0;  // the superblock says how long the layout is
  Superblock superblock{};
  std::memcpy(static_cast<void*>(&superblock), data + 1, kSuperblockGiven);
  std::vector<std::byte> record(size - 1 - kSuperblockGiven);
  std::memcpy(record.data(), data + 1 + kSuperblockGiven, record.size());
  const uint64_t claimed = superblock.layout_bytes;
  if (record.size() >= sizeof(LayoutHeader)) seal_layout(record, superblock);
  if (!honest) superblock.layout_bytes = claimed;

  const uint64_t stride =
      (record.size() + kSuperblockBytes - 1) / kSuperblockBytes * kSuperblockBytes;
  std::vector<std::byte> bytes(kSuperblockAreaBytes + kLayoutCopies * stride);
  for (uint32_t copy = 0; copy < kSuperblockCopies; ++copy) {
    superblock.magic = kSuperblockMagic;
    superblock.copy = copy;
    seal_superblock(superblock);
    std::memcpy(bytes.data() + superblock_offset(copy), &superblock, sizeof superblock);
  }
  for (uint32_t copy = 0; copy < kLayoutCopies; ++copy) {
    std::copy(record.begin(), record.end(),
              bytes.begin() + static_cast<std::ptrdiff_t>(kSuperblockAreaBytes + copy * stride));
  }
  device.write(bytes, superblock.container_bytes);

  const auto state = Store::peek(device.path());
  const auto summary = summarize(device.path());
  if (summary.ok()) {
    const auto run = smartinf::engine::run_description_from_json(summary->layout.description);
    if (run.ok()) {
      const std::string again = smartinf::engine::to_json(*run);
      SI_CHECK(smartinf::engine::run_description_from_json(again).ok(), "a description once only");
      for (const auto& range : run->space.ranges()) {
        SI_CHECK(std::none_of(range.name.begin(), range.name.end(),
                              [](unsigned char c) { return c < ' ' || c == 0x7f; }),
                 "a name that moves the cursor");
      }
    }
  }
  CheckOptions options;
  options.memory_bytes = uint64_t{1} << 20;
  const auto report = check_store(device.path(), options, [](const StoreFault&) {});
  SI_CHECK(!report.ok() || summary.ok() || report->state_lost || !report->state.initialized,
           "a store that is sound and cannot be described");
  return 0;
}
