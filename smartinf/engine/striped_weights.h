// clang-format off
// Weights that nobody updates, in one file on each of several directories.
//
//   DIR/weights := header stripe*   everything begins on a multiple of 4096 bytes, gaps are zero
//   header      := StripedHeader description u64 checksum{stripes of this file}
//   stripe      := elements [i x n, (i + 1) x n) of the space, in file i modulo the number of files;
//                  the last one may be shorter
//
// The header is written last, so that a file that was not finished is not taken for a whole one.
// clang-format on
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/weight_reader.h"
#include "smartinf/storage/file_descriptor.h"

namespace smartinf::engine {

inline constexpr std::string_view kWeightsFileName = "weights";

/// Little-endian.
struct StripedHeader {
  std::array<char, 8> magic{};
  /// XXH3-64 of the header from byte 16 on, with what lies behind this struct.
  uint64_t checksum = 0;
  uint32_t version = 0;
  uint32_t type = 0;               // base::DataType
  std::array<uint8_t, 16> set{};   // random; the files that belong together have the same
  uint32_t file = 0;               // this one's place in the set...
  uint32_t files = 0;              // ...of so many
  uint64_t elements = 0;           // of all files
  uint64_t stripe_elements = 0;    // n
  uint64_t description_bytes = 0;  // UTF-8
};
static_assert(sizeof(StripedHeader) == 72);

/// A stripe is a subgroup of this source; its checksum is checked whenever it is read.
/// Threads: one caller; threads of its own read.
class StripedWeights final : public WeightReader {
 public:
  /// Long enough for a drive, short enough that a unit's stripes are read side by side.
  static constexpr uint64_t kStripeBytes = 8 * base::kMiB;
  static constexpr uint64_t kDescriptionBytesMax = 64 * base::kMiB;

  struct Options {
    std::vector<std::string> directories;  // which exist
    uint64_t elements = 0;
    base::DataType type = base::DataType::kBf16;
    std::string description;               // the caller's own, kept with the weights
    uint64_t stripe_bytes = kStripeBytes;  // a multiple of base::kBlockElements of type
  };
  /// Makes the files anew, with all their space; what stood there is gone. Errors: kNotFound (a
  /// directory), kNoSpace, kBusy (a file is in use), after which what stood there stays;
  /// kInvalidArgument.
  static base::Result<std::unique_ptr<StripedWeights>> create(const Options& options);
  /// The directories may come in another order than for create(). Null where none has the file.
  /// Errors, with the file's name: kNotFound, kBusy (it is being written), kCorrupt (not finished,
  /// damaged, cut), kMismatch (files that do not belong together, or of another version).
  static base::Result<std::unique_ptr<StripedWeights>> open(
      const std::vector<std::string>& directories);
  /// Deletes the files that are there. Errors: kBusy.
  static base::Status remove(const std::vector<std::string>& directories);
  ~StripedWeights() override;

  base::DataType type() const { return files_->type; }
  const std::string& description() const { return description_; }

  /// After create(): the elements [first, first + count), of type(). They come in ascending order,
  /// without gaps, in pieces of any length; a stripe is written when it is full. Errors:
  /// kInvalidArgument for another order; kIo, after which the files can only be made anew.
  base::Status write(uint64_t first, const void* values, uint64_t count);
  /// Makes all of it durable. From now on the weights can be read. Errors: kFailedPrecondition
  /// where elements are missing; kIo.
  base::Status finish();

 private:
  struct File {
    std::string directory;
    std::string path;
    storage::FileDescriptor descriptor;
    uint64_t header_bytes = 0;
    std::vector<uint64_t> checksums;  // of its stripes, in their order
    bool ours = false;                // nothing that was somebody's is in it
  };
  /// The files that are read: not changed any more once it is whole.
  struct Files final : WeightFileSet {
    Files(const StripedHeader& of, std::vector<File> all)
        : set(of), type(static_cast<base::DataType>(of.type)), files(std::move(all)) {}
    base::Status read(const plan::Subgroup& stripe, base::DataType wanted,
                      std::byte* out) const override;
    std::string path_of(const plan::Subgroup& stripe) const override {
      return files[index_of(stripe)].path;
    }
    size_t index_of(const plan::Subgroup& stripe) const { return stripe.id.value % files.size(); }
    /// Its place among those of its file.
    size_t place_of(const plan::Subgroup& stripe) const { return stripe.id.value / files.size(); }
    uint64_t offset_of(const plan::Subgroup& stripe) const;

    const StripedHeader set;
    const base::DataType type;
    std::vector<File> files;
    std::atomic<bool> whole = false;  // and may be read
  };
  StripedWeights(std::shared_ptr<Files> files, std::string description);

  static base::Result<File> open_file(const std::string& directory, bool write);
  static base::Status reserve(const StripedHeader& set, std::span<File> files);
  static base::Status read_header(File& file, StripedHeader& header, std::string& description);
  /// Its size, when the header and the checksums have theirs.
  static uint64_t file_bytes(const StripedHeader& set, uint32_t file, uint64_t header_bytes);

  base::Status write_stripe(const plan::Subgroup& stripe);
  base::Status write_header(uint32_t file);

  const std::shared_ptr<Files> files_;
  const std::string description_;
  uint64_t written_ = 0;        // elements
  base::AlignedBuffer stripe_;  // the stripe that is being written
  base::Status failure_;        // of writing
};

}  // namespace smartinf::engine
